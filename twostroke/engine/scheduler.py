"""Which tokens run next, and who gives way to whom. Pure bookkeeping with integers.

A sequence is WAITING and holds nothing, or RUNNING and holds pages for all of its tokens; nobody waits while holding.
Classes are strict: a lower one gives up its place, and its pages, when a higher one needs them. Within a class the
oldest goes first and is the last to give way, so every sequence gets to its end.

The order is about room, and one rule is about use: who would compute what a running sequence of its class or a higher
one is about to fill is passed over until that is filled, or will not be. Those behind it may run meanwhile, but not in
its room, so that it loses nothing by waiting; and since it waits only for one that runs, nobody waits for each other.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field

from twostroke.engine.coalescing import Wait
from twostroke.engine.outputs import StepOutput
from twostroke.engine.paging import Paging, Prefix
from twostroke.engine.sequence import Sequence, SequenceState
from twostroke.engine.settings import EngineSettings
from twostroke.engine.step import Chunk, PageCopy, Refusal, Step
from twostroke.errors import BlocksMissing, Overloaded
from twostroke.types import FinishReason, Token


@dataclass(slots=True)
class _Draft:
    """A step in the making."""

    budget: int  # tokens left
    longest: int  # most prompt tokens of one sequence
    counts: dict[Sequence, int] = field(default_factory=dict)  # tokens of each, in the order of the pass
    copies: list[PageCopy] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    @property
    def half(self) -> int:
        return -(-self.budget // 2)

    def give(self, sequence: Sequence, most: int) -> None:
        """Let a sequence run up to `most` more of its tokens."""
        given = self.counts.get(sequence, 0)
        count = min(most, sequence.remaining - given, self.longest - given)
        if count > 0:
            self.counts[sequence] = given + count
            self.budget -= count

    def withdraw(self, sequence: Sequence) -> None:
        """Take back what a sequence was given, since it gives way."""
        self.budget += self.counts.pop(sequence, 0)


@dataclass(slots=True)
class _Kept:
    """Room for those that were passed over: nobody behind them gets it."""

    places: int = 0
    pages: int = 0


class Scheduler:
    """Sequences in order, and the rules by which they get pages and tokens of a step."""

    def __init__(self, settings: EngineSettings, paging: Paging) -> None:
        self._settings = settings
        self._paging = paging
        # Both by _seniority. Of the waiting the first comes next: who gave way is older than all who never ran.
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []  # the last one gives way first
        self._waits: dict[Sequence, Wait] = {}  # of those that were passed over
        self._stuck: tuple[Sequence, int, int, int, int] | None = None  # who did not fit, and the state of things then

    @property
    def running(self) -> int:
        """Sequences that hold pages."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that hold nothing."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens to be run before every sequence can sample its next one."""
        return sum(sequence.remaining for group in (self._waiting, self._running) for sequence in group)

    @property
    def claimed(self) -> int:
        """Pages that are spoken for: by the first in line, those passed over before it, and one for each that runs."""
        pages = self.running
        for sequence in self._waiting:
            wait = self._waits.get(sequence)
            if wait is None:
                return pages + self._paging.pages_for(sequence.length_to_admit)
            pages += wait.pages
        return pages

    def add(self, sequence: Sequence) -> None:
        """Let a new sequence wait for its turn.

        Raises:
            Overloaded: `max_waiting` sequences wait already, beyond those for which there is a place.
        """
        if self.waiting + self.running >= self._settings.max_waiting + self._settings.max_running:
            raise Overloaded(f"{self.waiting} requests are waiting and {self.running} running; no more are taken")
        insort(self._waiting, sequence, key=_seniority)

    def remove(self, sequence: Sequence) -> None:
        """End a sequence where it stands and free all it holds. Doing so twice changes nothing."""
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
            self._waits.pop(sequence, None)
        elif sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
            self._paging.free(sequence)
        sequence.state = SequenceState.ENDED

    def plan(self) -> Step | None:
        """Choose the next forward pass, or None when nothing can run.

        Running sequences go first, a token each, so that streams stay smooth. Prompts share what is left of the
        budget, those begun before new ones: each leaves half of it to those behind, so that a short prompt need not
        wait for the end of a long one, and what they do not need goes to the oldest. A new one is admitted with all of
        its pages at once, or not at all.
        """
        draft = _Draft(self._settings.tokens_per_step, self._settings.max_chunk or self._settings.tokens_per_step)
        self._decode(draft)
        for sequence in self._running:
            if sequence.remaining > 1:
                draft.give(sequence, draft.half)
        self._admit(draft)
        for sequence in self._running:
            draft.give(sequence, draft.budget)
        chunks = tuple(Chunk.of(sequence, count) for sequence, count in draft.counts.items())
        return Step(chunks, tuple(draft.copies), tuple(draft.refusals)) if chunks or draft.refusals else None

    def settle(self, step: Step, sampled: Mapping[Sequence, tuple[Token, ...]]) -> list[tuple[Sequence, StepOutput]]:
        """Record what a step computed and sampled; returns each sequence's progress.

        Args:
            step: as planned; sequences removed since then are passed over.
            sampled: tokens of each sequence, one per choice, none where its chunk does not sample.
        """
        return [
            (chunk.sequence, self._progress(chunk, sampled[chunk.sequence]))
            for chunk in step.chunks
            if chunk.sequence.state is SequenceState.RUNNING
        ]

    def _decode(self, draft: _Draft) -> None:
        """Give a token to each running sequence that has just one to run, the most senior first."""
        for sequence in tuple(self._running):  # a copy: making room may preempt
            running = sequence.state is SequenceState.RUNNING
            if running and sequence.remaining == 1 and self._make_room(sequence):
                draft.give(sequence, 1)

    def _make_room(self, sequence: Sequence) -> bool:
        """Get room for the next token; the last in seniority gives way, which may be the sequence itself."""
        while not self._paging.grow(sequence):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _admit(self, draft: _Draft) -> None:
        """Admit waiting sequences in turn until one does not fit; nobody overtakes it.

        Those that had better wait are passed over, and their room is kept.
        """
        kept = _Kept()
        while kept.places < self.waiting and draft.budget > 0:
            sequence = self._waiting[kept.places]
            wait = self._waits.pop(sequence, None)
            if wait is None or not self._paging.lasts(wait, sequence):
                state = (sequence, self._paging.changes, self.running, kept.places, kept.pages)
                if self._stuck == state:
                    return
                prefix = self._paging.find(sequence)
                wait = self._paging.wait(sequence, prefix)
                if wait is None:
                    if self._take(sequence, prefix, kept, draft):
                        continue
                    self._stuck = state
                    return
            self._waits[sequence] = wait
            kept.places += 1
            kept.pages += wait.pages

    def _take(self, sequence: Sequence, prefix: Prefix, kept: _Kept, draft: _Draft) -> bool:
        """Admit a waiting sequence, or turn it away; False when it does not fit."""
        refusal = _refusal(sequence, prefix)
        if refusal is not None:
            self.remove(sequence)
            draft.refusals.append(refusal)
            return True
        if not self._enter(sequence, prefix, kept, draft):
            return False
        copy = self._paging.copy_of(sequence, prefix)
        draft.copies += [copy] if copy else []
        draft.give(sequence, draft.half)
        return True

    def _enter(self, sequence: Sequence, prefix: Prefix, kept: _Kept, draft: _Draft) -> bool:
        """Make a waiting sequence a running one, if a place and its pages can be had beside what is kept.

        Lower classes give way, the last in seniority first, and none of them for a sequence that would not get in.
        """
        lower = [each for each in self._running if each.request.priority > sequence.request.priority]
        places = self._settings.max_running
        if self.running - len(lower) + kept.places >= places:
            return False
        if not self._paging.fits(sequence, prefix, without=lower, keep=kept.pages):
            return False
        while self.running >= places or not self._paging.reserve(sequence, prefix):
            draft.withdraw(self._running[-1])
            self._preempt(self._running[-1])
        self._waiting.remove(sequence)
        if sequence.cached is None:
            sequence.cached = min(prefix.tokens, len(sequence.request.prompt))
        sequence.state = SequenceState.RUNNING
        insort(self._running, sequence, key=_seniority)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to wait. Its tokens stay; its full blocks stay cached as long as they can."""
        self._running.remove(sequence)
        self._paging.free(sequence)
        sequence.state = SequenceState.WAITING
        sequence.preemptions += 1
        insort(self._waiting, sequence, key=_seniority)

    def _progress(self, chunk: Chunk, sampled: tuple[Token, ...]) -> StepOutput:
        sequence = chunk.sequence
        sequence.computed += chunk.count
        first_only = sequence.request.first_token_only
        filled = self._paging.publish(sequence, tail=first_only and chunk.samples)
        verdicts = tuple(sequence.verdict(token.id, len(sequence.tokens) + 1) for token in sampled)
        ended = _ended(verdicts)
        output = StepOutput(
            tokens=sampled,
            filled=filled,
            computed=sequence.computed,
            cached=sequence.cached or 0,
            finish=ended,
            choices=verdicts if first_only else (),
        )
        if ended or (first_only and sampled):
            self.remove(sequence)
        elif sampled:
            sequence.append(sampled[0].id)
        return output


def _refusal(sequence: Sequence, prefix: Prefix) -> Refusal | None:
    """Whether a sequence that was never admitted would have to compute more than its caller allows."""
    allowed, missing = sequence.request.max_uncached, len(sequence.tokens) - prefix.tokens
    if sequence.cached is not None or allowed is None or missing <= allowed:
        return None
    return Refusal(sequence, BlocksMissing(f"{missing} tokens would have to be computed; {allowed} are allowed"))


def _ended(verdicts: tuple[FinishReason | None, ...]) -> FinishReason | None:
    """Why a sequence ended: the reason of its first choice, once none of its choices goes on."""
    return verdicts[0] if verdicts and None not in verdicts else None


def _seniority(sequence: Sequence) -> tuple[int, int]:
    return (sequence.request.priority, sequence.number)
