"""One case of the disk: a prompt is written, found again by the node's next life, and read, with a blow on the way."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

from tests.faults.kit.disk import BLOCK_TOKENS, BLOCKS, DiskCase, Phase
from tests.faults.kit.node import StoreNode
from tests.faults.kit.stage import ANSWER_SECONDS, Outcome, Stage
from tests.faults.kit.strikes import Blow, aimed, ended
from tests.support.alone import Alone, Told
from tests.support.processes import Processes, Service
from tests.support.routed import Answering, Question, Routed

# The node does not wait for a disk as long as a delay lasts, and soon tries one again that failed.
DISK = ("--disk-retry-seconds", "0.3", "--disk-read-seconds", "0.3")
OFF = '"the disk tier is off'
RETURN_SECONDS = 20.0
SHORT = 40  # tokens


@dataclass(frozen=True, kw_only=True)
class Blown:
    """A request that a blow was dealt to; `routed` is None where the user left."""

    routed: Routed | None
    struck_at: float
    answered_at: float
    freed_at: float
    attempts: int


class DiskScene(Stage):
    """A cluster whose workers stand on two sides, so that what one side wrote the other has to read."""

    def __init__(self, whole: Processes, alone: Alone, seed: int) -> None:
        super().__init__(whole, alone, seed)
        assert whole.far is not None
        self._far, self._near = whole.far, whole.lone
        self._node = StoreNode(whole.kvstore)
        self._life = ""  # of the node that everybody has attached to

    async def play(self, case: DiskCase) -> Outcome:
        """Play a case. Raises AssertionError, when something is wrong."""
        _, question = self.begun("disk")
        truth = await question.alone(self.alone)
        if (await self._node.status()).incarnation != self._life:
            await self._live_again()
        blown = await self._written(case, question, truth)
        if case.phase is not Phase.OPENED:
            await self._open()
        if blown is None:
            blown = await self._struck(case, self._near, question, truth)
            found = blown.routed
        else:
            found = await self._ask(self._near, question, truth)
        if case.found is not None:
            assert found is not None
            assert found.usage.cached.store == case.found * BLOCK_TOKENS, f"{found.usage} is not {case.found} blocks"
        await self._assert_counted(case)
        returned_at = await self._on_again()
        await self._assert_as_before()
        self.assert_calm()
        return Outcome(
            name=case.name,
            blow=case.blow.value,
            recovered=blown.answered_at - blown.struck_at,
            freed=blown.freed_at - blown.answered_at,
            attempts=blown.attempts,
            returned=returned_at - blown.struck_at,
        )

    async def _written(self, case: DiskCase, question: Question, truth: list[Told]) -> Blown | None:
        """A life of the node ends after a prompt was written, if its disk let that happen."""
        if case.phase is not Phase.WRITTEN:
            await self._ask(self._far, question, truth)
            await self._restart()
            return None
        failures = (await self._node.status()).disk.failures
        blown = await self._struck(case, self._far, question, truth)
        if case.blow is not Blow.KILL_SERVER:
            await self._node.until(lambda status: status.disk.failures == failures + case.turns_off)
            await self._restart()
        return blown

    async def _struck(self, case: DiskCase, door: Service, question: Question, truth: list[Told]) -> Blown:
        """Ask while the disk is struck: by what the question makes of it, or before that, as it is opened."""
        name, asked = self.named("disk"), None
        async with AsyncExitStack() as stack:
            fault = await stack.enter_async_context(aimed(self._node.address, case))
            if case.phase is Phase.OPENED:
                await self._node.attach()
            else:
                asked = self._asking(door, question, name)
            await fault.struck()
            struck_at = time.monotonic()
            if case.blow is Blow.KILL_SERVER:
                await self.whole.kvstore.kill()
                await self.whole.kvstore.start()
            asked = asked or self._asking(door, question, name)
            stack.push_async_callback(ended, asked)
            if case.blow is not Blow.CANCEL:
                async with asyncio.timeout(ANSWER_SECONDS):
                    (await asked).assert_same(truth)
            else:
                await ended(asked)
            answered_at = time.monotonic()
        await self.whole.settled()
        freed_at = time.monotonic()
        record = await self.record(name)
        assert record["outcome"] == ("cancelled" if case.blow is Blow.CANCEL else "completed"), record
        return Blown(
            routed=None if asked.cancelled() else asked.result(),
            struck_at=struck_at,
            answered_at=answered_at,
            freed_at=freed_at,
            attempts=record["attempts"],
        )

    def _asking(self, door: Service, question: Question, name: str) -> asyncio.Task[Routed]:
        return asyncio.create_task(Answering(question).asked(self.whole.clients[door], request_id=name))

    async def _ask(self, door: Service, question: Question, truth: list[Told]) -> Routed:
        routed = await self._asking(door, question, self.named("disk"))
        routed.assert_same(truth)
        await self.whole.settled()
        return routed

    async def _restart(self) -> None:
        """End the node as at a rollout, when it writes what waits for the disk, and start it."""
        await self._node.status()  # which tells the format, for the next life
        self.whole.kvstore.terminate()
        assert await self.whole.kvstore.ended() == 0
        await self.whole.kvstore.start()

    async def _open(self) -> None:
        """Let the node's present life begin: its disk is on, and everybody knows it."""
        await self._node.attach()
        await self._node.until(lambda status: status.disk.on)
        callers = (self._far, self._near, *self.whole.prefill, *self.whole.decode)
        await self._node.known_to(callers, self._ask_both_sides)
        self._life = (await self._node.status()).incarnation

    async def _live_again(self) -> None:
        await self._restart()
        await self._open()

    async def _ask_both_sides(self) -> None:
        for door in (self._far, self._near):
            await self.whole.clients[door].complete(self.question(SHORT).prompt, max_tokens=2)
        await self.whole.settled()

    async def _assert_counted(self, case: DiskCase) -> None:
        """The node that was struck counts it, and says it once; nobody else does."""
        counts_here = case.phase is not Phase.WRITTEN and case.blow is not Blow.KILL_SERVER
        await self._node.until(
            lambda status: (status.disk.failures, status.disk.damaged) == (case.turns_off and counts_here, case.damages)
        )
        said = [line for line in self.whole.kvstore.lines if OFF in line]
        assert len(said) == case.turns_off, f"the node said {len(said)} times that its disk is off: {said}"

    async def _on_again(self) -> float:
        """When the disk is on, which it comes to be by itself, with a later write."""
        async with asyncio.timeout(RETURN_SECONDS):
            while not (await self._node.status()).disk.on:
                await self._ask_both_sides()
        return time.monotonic()

    async def _assert_as_before(self) -> None:
        """What is written now is found after a restart, to the last block."""
        question = self.question()
        truth = await question.alone(self.alone)
        await self._ask(self._far, question, truth)
        await self._live_again()
        routed = await self._ask(self._near, question, truth)
        assert routed.usage.cached.store == BLOCKS * BLOCK_TOKENS, f"{routed.usage} is not the whole prompt"
