"""Stages of a handoff: where one choice of a request is between its prompt and its last token, and what may happen.

The router drives it (`services/router/errand.py`), and `docs/handoff.md` is this table as a page (`make docs`). Pure:
`move` looks up one rule.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from twostroke.errors import Internal


class Stage(enum.Enum):
    """Where a choice is."""

    QUEUED = "queued"  # nobody works on it
    COMPUTING = "computing"  # a prefill worker runs the prompt, and publishes its blocks meanwhile
    PUBLISHED = "published"  # the router holds the ticket, if there is one, and renews its lease
    LOADING = "loading"  # a decode worker has the order, and brings blocks into its pages
    OWNED = "owned"  # a decode worker's pages hold everything; the lease is released
    DONE = "done"  # nobody holds anything


class Event(enum.Enum):
    """What can happen to a choice."""

    PREFILL_CALLED = "prefill called"
    PREFILL_ABSENT = "no prefill worker"
    TICKET_SHARED = "ticket shared"
    FIRST_TOKEN = "first token"
    HANDED_OVER = "handed over"
    DECODE_CALLED = "decode called"
    ADMITTED = "admitted"
    TOKENS = "tokens"
    FINISHED = "finished"
    LEASE_ENDED = "lease ended"
    BLOCKS_MISSING = "blocks missing"
    BLOCKS_MISSING_AGAIN = "blocks missing again"
    PREFILL_LOST = "prefill lost"
    PREFILL_LOST_LATE = "prefill lost late"
    DECODE_LOST = "decode lost"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    GIVEN_UP = "given up"


MEANING = {
    Event.PREFILL_CALLED: "a prefill worker was chosen and called",
    Event.PREFILL_ABSENT: "no prefill worker is left to try, and a decode worker is",
    Event.TICKET_SHARED: "the prompt was run again for another choice of the same request",
    Event.FIRST_TOKEN: "the first token has come, before the last block",
    Event.HANDED_OVER: "the prefill worker has answered; it holds nothing any more",
    Event.DECODE_CALLED: "a decode worker was chosen and called",
    Event.ADMITTED: "the decode worker has all blocks in its pages, or computes what is short",
    Event.TOKENS: "the decode worker wrote tokens",
    Event.FINISHED: "an end token, a stop string or the limit was reached",
    Event.LEASE_ENDED: "the lease ended by time, or the store restarted",
    Event.BLOCKS_MISSING: "blocks are gone, stale or damaged, more than decode computes by itself",
    Event.BLOCKS_MISSING_AGAIN: "the same, after the prompt was run again",
    Event.PREFILL_LOST: "the prefill worker died, is silent or refused, before the first token",
    Event.PREFILL_LOST_LATE: "the same, after the first token",
    Event.DECODE_LOST: "the decode worker died, is silent or refused",
    Event.CANCELLED: "the caller left",
    Event.DEADLINE: "the request's time is up",
    Event.GIVEN_UP: "a retry was lost too, or nobody is there to retry",
}


@dataclass(frozen=True, slots=True)
class Rule:
    """What one event in one stage leads to."""

    to: Stage
    then: str  # what is done, for the reader of docs/handoff.md


_ENDS = {
    Event.CANCELLED: "every call is cancelled; pages, slots and the lease return; committed blocks stay, they are true",
    Event.DEADLINE: "as if cancelled; the caller gets DEADLINE_EXCEEDED",
    Event.GIVEN_UP: "as if cancelled; the caller gets a typed error that says whether to retry",
}
_ENDED = {event: Rule(Stage.DONE, then) for event, then in _ENDS.items()}

RULES: dict[Stage, dict[Event, Rule]] = {
    Stage.QUEUED: {
        Event.PREFILL_CALLED: Rule(Stage.COMPUTING, "the prompt runs; decode is told to load what is published"),
        Event.PREFILL_ABSENT: Rule(Stage.PUBLISHED, "without a ticket: decode computes what is not stored"),
        Event.TICKET_SHARED: Rule(Stage.PUBLISHED, "with the new ticket, or none, as that one"),
        **_ENDED,
    },
    Stage.COMPUTING: {
        Event.FIRST_TOKEN: Rule(Stage.COMPUTING, "it goes to the caller at once"),
        Event.FINISHED: Rule(Stage.DONE, "the first token was the last: nothing is handed over"),
        Event.HANDED_OVER: Rule(Stage.PUBLISHED, "the router renews the lease from here on"),
        Event.LEASE_ENDED: Rule(Stage.COMPUTING, "the ticket names fewer blocks; decode computes the others"),
        Event.PREFILL_LOST: Rule(Stage.QUEUED, "another worker runs the prompt, once, and finds what was stored"),
        Event.PREFILL_LOST_LATE: Rule(Stage.PUBLISHED, "without a ticket: decode goes on from the first token"),
        **_ENDED,
    },
    Stage.PUBLISHED: {
        Event.DECODE_CALLED: Rule(Stage.LOADING, "blocks are read, in the order of the prompt"),
        Event.PREFILL_LOST_LATE: Rule(Stage.PUBLISHED, "without a ticket: the worker may have released its lease"),
        Event.LEASE_ENDED: Rule(Stage.PUBLISHED, "decode finds out which blocks are still there"),
        **_ENDED,
    },
    Stage.LOADING: {
        Event.ADMITTED: Rule(Stage.OWNED, "the lease is released once every choice has its blocks"),
        Event.LEASE_ENDED: Rule(Stage.LOADING, "what was not read yet may be missing"),
        Event.BLOCKS_MISSING: Rule(Stage.QUEUED, "the prompt runs again, once for all choices; no token comes twice"),
        Event.BLOCKS_MISSING_AGAIN: Rule(Stage.PUBLISHED, "without a ticket: decode computes all of it"),
        Event.DECODE_LOST: Rule(Stage.PUBLISHED, "another worker, or the restarted one, reads what is stored"),
        **_ENDED,
    },
    Stage.OWNED: {
        Event.TOKENS: Rule(Stage.OWNED, "they go to the caller; full blocks are published behind the steps"),
        Event.FINISHED: Rule(Stage.DONE, "the sequence's pages return; cached ones stay"),
        Event.DECODE_LOST: Rule(Stage.PUBLISHED, "another worker goes on from prompt + emitted tokens"),
        **_ENDED,
    },
    Stage.DONE: {},
}


def move(stage: Stage, event: Event) -> Stage:
    """The stage after `event`. Raises Internal for an event that has no place in this stage."""
    rule = RULES[stage].get(event)
    if rule is None:
        raise Internal(f"a choice that is {stage.value} cannot see '{event.value}'")
    return rule.to
