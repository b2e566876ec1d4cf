"""Which tokens run next, and who gives way to whom. Pure bookkeeping with integers.

A sequence is WAITING and holds nothing, or RUNNING and holds pages for all of its tokens; nobody waits while holding.
Classes are strict: a lower one gives up its place, and its pages, when a higher one needs them. Within a class the
oldest goes first and is the last to give way, so every sequence gets to its end.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field

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
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    def add(self, sequence: Sequence) -> None:
        chunk = Chunk.of(sequence, min(self.budget, self.longest))
        self.chunks.append(chunk)
        self.budget -= chunk.count


class Scheduler:
    """Sequences in order, and the rules by which they get pages and tokens of a step."""

    def __init__(self, settings: EngineSettings, paging: Paging) -> None:
        self._settings = settings
        self._paging = paging
        self._waiting: list[Sequence] = []  # by _turn
        self._running: list[Sequence] = []  # by _seniority: the last one gives way first
        self._stuck: tuple[Sequence, int, int] | None = None  # who did not fit, and the state of things then

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

    def add(self, sequence: Sequence) -> None:
        """Let a new sequence wait for its turn.

        Raises:
            Overloaded: `max_waiting` sequences wait already, beyond those for which there is a place.
        """
        if self.waiting + self.running >= self._settings.max_waiting + self._settings.max_running:
            raise Overloaded(f"{self.waiting} requests are waiting and {self.running} running; no more are taken")
        insort(self._waiting, sequence, key=_turn)

    def remove(self, sequence: Sequence) -> None:
        """End a sequence where it stands and free all it holds. Doing so twice changes nothing."""
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        elif sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
            self._paging.free(sequence)
        sequence.state = SequenceState.ENDED

    def plan(self) -> Step | None:
        """Choose the next forward pass, or None when nothing can run.

        Running sequences go first, a token each, so that streams stay smooth; prompts share what is left of the
        budget, those begun before new ones. A new one is admitted with all of its pages at once, or not at all.
        """
        draft = _Draft(self._settings.tokens_per_step, self._settings.max_chunk or self._settings.tokens_per_step)
        self._decode(draft)
        for sequence in self._running:
            if draft.budget > 0 and sequence.remaining > 1:
                draft.add(sequence)
        self._admit(draft)
        # A sequence may have given way to one that was admitted after its own chunk was chosen.
        chunks = tuple(chunk for chunk in draft.chunks if chunk.sequence.state is SequenceState.RUNNING)
        return Step(chunks, tuple(draft.copies), tuple(draft.refusals)) if chunks or draft.refusals else None

    def settle(self, step: Step, sampled: Mapping[Sequence, tuple[Token, ...]]) -> list[tuple[Sequence, StepOutput]]:
        """Record what a step computed and sampled; returns each sequence's progress.

        Args:
            step: as planned; sequences removed since then are passed over.
            sampled: tokens of each sequence whose chunk samples, one per choice.
        """
        return [
            (chunk.sequence, self._progress(chunk, sampled.get(chunk.sequence, ())))
            for chunk in step.chunks
            if chunk.sequence.state is SequenceState.RUNNING
        ]

    def _decode(self, draft: _Draft) -> None:
        """Give a token to each running sequence that has just one to run, the most senior first."""
        for sequence in tuple(self._running):  # a copy: making room may preempt
            running = sequence.state is SequenceState.RUNNING
            if running and sequence.remaining == 1 and self._make_room(sequence):
                draft.add(sequence)

    def _make_room(self, sequence: Sequence) -> bool:
        """Get room for the next token; the last in seniority gives way, which may be the sequence itself."""
        while not self._paging.grow(sequence):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _admit(self, draft: _Draft) -> None:
        """Admit waiting sequences in turn until one does not fit; nobody overtakes it."""
        while self._waiting and draft.budget > 0:
            sequence = self._waiting[0]
            if self._stuck == (sequence, self._paging.returned, self.running):
                return
            prefix = self._paging.find(sequence)
            refusal = _refusal(sequence, prefix)
            if refusal is not None:
                self.remove(sequence)
                draft.refusals.append(refusal)
            elif self._enter(sequence, prefix):
                copy = self._paging.copy_of(sequence, prefix)
                draft.copies += [copy] if copy else []
                draft.add(sequence)
            else:
                self._stuck = (sequence, self._paging.returned, self.running)
                return

    def _enter(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Make the first waiting sequence a running one, if a place and its pages can be had."""
        while self.running >= self._settings.max_running or not self._paging.reserve(sequence, prefix):
            victim = self._running[-1] if self._running else None
            if victim is None or victim.request.priority <= sequence.request.priority:
                return False
            self._preempt(victim)
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
        sequence.state, sequence.preempted = SequenceState.WAITING, True
        insort(self._waiting, sequence, key=_turn)

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


def _turn(sequence: Sequence) -> tuple[int, bool, int]:
    return (sequence.request.priority, not sequence.preempted, sequence.number)


def _seniority(sequence: Sequence) -> tuple[int, int]:
    return (sequence.request.priority, sequence.number)
