"""The engine without threads and without asyncio: sequences go in, one step runs, progress comes out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from twostroke.engine.blocks import BlockPool
from twostroke.engine.loans import PageLoans
from twostroke.engine.outputs import EngineLoad, StepOutput
from twostroke.engine.paging import Paging
from twostroke.engine.scheduler import Scheduler
from twostroke.engine.sequence import EngineRequest, Sequence, SequenceState
from twostroke.engine.settings import EngineSettings
from twostroke.engine.step import Step
from twostroke.engine.validation import Bounds
from twostroke.errors import Internal, TwostrokeError
from twostroke.types import Token

_SPOILED = "the numbers of the model are not finite, or leave no token; --kv-dtype f32 holds larger keys and values"

_log = logging.getLogger(__name__)


class StepRunner(Protocol):
    """What turns a step into tokens: `Runner`, or arithmetic on paper."""

    def run(self, step: Step) -> Mapping[Sequence, tuple[Token, ...]]:
        """Return each sequence's tokens, none where its chunk does not sample; one that came to nothing is absent."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Progress of one sequence, or the error that ended it."""

    number: int
    outcome: StepOutput | TwostrokeError
    last: bool


class EngineCore:
    """Owns scheduler, pool and sequences. Not thread-safe: exactly one thread calls it.

    Args:
        settings: budgets and limits.
        bounds: sizes of model and pool.
        end_token_ids: the model's own end tokens.
        runner: runs a planned step.
    """

    def __init__(
        self, settings: EngineSettings, bounds: Bounds, end_token_ids: frozenset[int], runner: StepRunner
    ) -> None:
        self._bounds = bounds
        self._end_token_ids = end_token_ids
        self._runner = runner
        self._pool = BlockPool(settings.pages)
        self.loans = PageLoans(self._pool)
        self._paging = Paging(self._pool, self.loans, bounds.page_tokens)
        self._scheduler = Scheduler(settings, self._paging)
        self._sequences: dict[int, Sequence] = {}
        self._steps = 0

    @property
    def busy(self) -> bool:
        """Whether any sequence is here."""
        return bool(self._sequences)

    def submit(self, number: int, request: EngineRequest) -> list[Delivery]:
        """Take in a request that `Bounds.check` accepted, under a number that grows with each one.

        Returns: nothing, or the end at once: refused as Overloaded, or finished by the tokens emitted elsewhere.
        """
        bounds = self._bounds
        sequence = Sequence(
            request,
            number=number,
            page_tokens=bounds.page_tokens,
            context=bounds.context,
            end_token_ids=self._end_token_ids,
        )
        finish = sequence.finished_elsewhere()
        if finish is not None:
            return [Delivery(number, StepOutput(computed=0, cached=0, finish=finish), last=True)]
        try:
            self._scheduler.add(sequence)
        except TwostrokeError as error:
            return [Delivery(number, error, last=True)]
        self._sequences[number] = sequence
        return []

    def cancel(self, number: int) -> None:
        """Free all that a sequence holds; one that has ended, or never was, changes nothing."""
        sequence = self._sequences.pop(number, None)
        if sequence is not None:
            self._scheduler.remove(sequence)

    def cached_blocks(self, keys: Items[bytes]) -> int:
        """How many leading keys are in pages; pins nothing."""
        return len(self._pool.match(keys))

    def lend_pages(self, count: int, behind: Items[bytes] = ()) -> list[int]:
        """Lend up to `count` pages to be filled: fewer, or none, when memory is short or spoken for.

        Blocks that are loaded for later requests never take the pages that the first in line waits for, nor those
        that hold the blocks named by `behind`: what comes after them is of no use without them.
        """
        head = self._pool.match(behind)
        kept = sum(self._pool.touch(page) for page in reversed(head))
        return self.loans.take(min(count, self._pool.available - self._scheduler.claimed - kept))

    def step(self) -> list[Delivery] | None:
        """Plan and run one step; None when nothing can run until a command comes.

        An exception in the pass fails what is in the step and nothing else: its blocks were not published.
        """
        step = self._scheduler.plan()
        if step is None:
            return None
        deliveries = [self._end(refusal.sequence, refusal.error) for refusal in step.refusals]
        if not step.chunks:
            return deliveries
        try:
            sampled = self._runner.run(step)
        except Exception as error:  # noqa: BLE001 - whatever a pass raises ends this step alone
            _log.exception("a step of %d sequences failed", len(step.chunks))
            failure = Internal(f"the step failed: {type(error).__name__}")
            return deliveries + [self._end(chunk.sequence, failure) for chunk in step.chunks]
        self._steps += 1
        spoiled = [chunk.sequence for chunk in step.chunks if chunk.sequence not in sampled]
        deliveries += [self._end(sequence, Internal(_SPOILED)) for sequence in spoiled]  # nothing of it is published
        return deliveries + [self._deliver(*progress) for progress in self._scheduler.settle(step, sampled)]

    def load(self) -> EngineLoad:
        """A look at everything, between two steps."""
        return EngineLoad(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            waiting_tokens=self._scheduler.waiting_tokens,
            free_pages=self._pool.free,
            evictable_pages=self._pool.evictable,
            lent_pages=self.loans.count,
            pages=self._pool.capacity,
            steps=self._steps,
            busy=self.busy,
        )

    def check_idle(self) -> None:
        """With no sequence here, compare what is outside the pool with what is lent; costs the same for any pool.

        Raises:
            Internal: a page was lost, or given to two; or a block is waited for that nobody fills.
        """
        held = self._pool.capacity - self._pool.available
        if not self.busy and held != self.loans.count:
            raise Internal(f"{held} pages are in use and {self.loans.count} are lent, but nothing runs")
        if not self.busy and self._paging.promised:
            raise Internal(f"{self._paging.promised} blocks are to be filled, but nothing runs")

    def check_integrity(self) -> None:
        """Prove the accounts page by page: for tests, and for the end of an engine. It looks at the whole pool.

        Raises:
            Internal: they do not add up.
        """
        self._pool.check_integrity()
        self.check_idle()

    def _end(self, sequence: Sequence, error: TwostrokeError) -> Delivery:
        self.cancel(sequence.number)
        return Delivery(sequence.number, error, last=True)

    def _deliver(self, sequence: Sequence, output: StepOutput) -> Delivery:
        last = sequence.state is SequenceState.ENDED
        if last:
            del self._sequences[sequence.number]
            if sequence.preemptions:
                _log.info("request %s gave way %d times for want of pages", sequence.request.id, sequence.preemptions)
        return Delivery(sequence.number, output, last)
