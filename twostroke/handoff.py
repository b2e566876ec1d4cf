"""What router, prefill and decode tell each other about one request, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.kv.refs import BlockRef, Lease
from twostroke.types import CachedTokens, FinishReason, RequestContext, SamplingParams, StopConditions, Token


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The right to load the blocks of a prompt; names, never bytes."""

    blocks: tuple[BlockRef, ...]  # in prompt order, from the first, without a gap
    lease: Lease
    format_digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOrder:
    """Run a prompt to its first token."""

    context: RequestContext
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stops: StopConditions
    lease_id: str  # of a lease that is not open yet
    choices: int = 1


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a prompt is."""

    computed: int  # tokens
    published: int  # leading blocks that the store holds under the lease
    lease: Lease | None


@dataclass(frozen=True, slots=True)
class First:
    """The first token of each choice, and why a choice ended with it."""

    tokens: tuple[tuple[Token, FinishReason | None], ...]
    cached: CachedTokens


@dataclass(frozen=True, slots=True)
class Handover:
    """The prompt is done; the ticket's lease is the receiver's now. No ticket: nothing could be stored."""

    ticket: Ticket | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOrder:
    """Write the rest of one choice."""

    context: RequestContext
    prompt: tuple[int, ...]
    emitted: tuple[int, ...]  # tokens of the choice that exist already
    sampling: SamplingParams
    stops: StopConditions
    choice: int
    ticket: Ticket | None  # None: compute everything here


@dataclass(frozen=True, slots=True)
class Admitted:
    """Where the keys and values of a prompt came from, in tokens."""

    local: int
    store: int
    computed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Tokens of one choice since the last of these."""

    tokens: tuple[Token, ...]
    finish: FinishReason | None = None
    admitted: Admitted | None = None  # in the first one
