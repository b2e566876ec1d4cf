"""One case of the kit: a request under way, a blow at one of its messages, and what must be true afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import AsyncExitStack

from tests.faults.kit.points import Case
from tests.faults.kit.stage import ANSWER_SECONDS, ANSWER_TOKENS, Outcome, Stage
from tests.faults.kit.strikes import Blow, PassedByError, aimed, ended, first_struck
from tests.support.processes import Service
from tests.support.routed import Answering, Routed
from twostroke.client import Client

TRIES = 4
FIRST_TOKEN_SECONDS = 0.1  # about; a caller that leaves earlier leaves in the middle of the prompt


class Scene(Stage):
    """A cluster in which one case after the other is played."""

    async def play(self, case: Case) -> Outcome:
        """Play a case, again where the request passed its point by. Raises AssertionError, when something is wrong."""
        for _ in range(TRIES):
            with contextlib.suppress(PassedByError):
                return await self._play(case)
        raise AssertionError(f"in {TRIES} tries the request never came to this point")

    async def _play(self, case: Case) -> Outcome:
        name, question = self.begun("case")
        truth = await question.alone(self.alone)
        async with AsyncExitStack() as stack:
            faults = {each: await stack.enter_async_context(aimed(each.address, case)) for each in self._servers(case)}
            asked = asyncio.create_task(Answering(question).asked(self._client(case), request_id=name))
            stack.push_async_callback(ended, asked)
            struck = await first_struck(faults, asked)
            struck_at = time.monotonic()
            for other in faults.keys() - {struck}:
                faults[other].disarm()
            await self._strike(case, struck, asked)
            if case.blow is not Blow.CANCEL:
                async with asyncio.timeout(ANSWER_SECONDS):
                    (await asked).assert_same(truth)
            answered_at = time.monotonic()
            if case.blow is Blow.STOP_SERVER:
                struck.thaw()
        await self.whole.settled()
        freed_at = time.monotonic()
        record = await self.record(name)
        assert record["outcome"] == ("cancelled" if case.blow is Blow.CANCEL else "completed"), record
        assert case.blow is Blow.CANCEL or record["completion_tokens"] == ANSWER_TOKENS, record
        self.assert_calm()
        return Outcome(
            name=case.name,
            blow=case.blow.value,
            recovered=answered_at - struck_at,
            freed=freed_at - answered_at,
            attempts=record["attempts"],
        )

    async def leave(self) -> float:
        """Ask, and leave at some moment; answers the seconds until nothing was held for it anywhere."""
        name, question = self.begun("left")
        moment = self.dice.choice((None, *range(1, ANSWER_TOKENS)))  # before the first token, or after so many
        changed = asyncio.Event()
        answering = Answering(question, changed.set)
        asked = asyncio.create_task(answering.asked(self.whole.clients[self.whole.router], request_id=name))
        if moment is None:
            await asyncio.wait({asked}, timeout=self.dice.random() * FIRST_TOKEN_SECONDS)
        while moment is not None and answering.least < moment:
            changed.clear()
            await changed.wait()
        await ended(asked)
        left_at = time.monotonic()
        await self.whole.settled()
        self.assert_calm()
        return time.monotonic() - left_at

    def _servers(self, case: Case) -> list[Service]:
        """Where the fault is armed: in both workers of a kind where one is to replace the other, else in the first."""
        whole = self.whole
        kinds = {"kvstore": [whole.kvstore], "prefill": whole.prefill, "decode": whole.decode}
        servers = kinds[case.point.server]
        return servers if _has_peers(case) else servers[:1]

    def _client(self, case: Case) -> Client:
        """A way in: to all workers, or to the first of each kind, so that it is known who calls whom."""
        return self.whole.clients[self.whole.router if _has_peers(case) else self.whole.lone]

    async def _strike(self, case: Case, struck: Service, asked: asyncio.Task[Routed]) -> None:
        """Deal the blow while the message is held; what fails, waits or lies was struck already.

        A killed process is started again at once, as its supervisor would.
        """
        match case.blow:
            case Blow.KILL_SERVER | Blow.KILL_CALLER:
                callers = {"prefill": self.whole.prefill[0], "decode": self.whole.decode[0]}
                victim = struck if case.blow is Blow.KILL_SERVER else callers[case.point.caller]
                await victim.kill()
                await victim.start()
            case Blow.STOP_SERVER:
                struck.freeze()
            case Blow.CANCEL:
                asked.cancel()
                await asyncio.wait({asked})


def _has_peers(case: Case) -> bool:
    return case.blow in (Blow.KILL_SERVER, Blow.STOP_SERVER)
