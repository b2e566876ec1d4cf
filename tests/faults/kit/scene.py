"""One case of the kit: a request under way, a blow at one of its messages, and what must be true afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.faults.kit.points import Blow, Case
from tests.support.alone import Alone
from tests.support.faults import Armed, armed
from tests.support.processes import Processes, Service
from tests.support.routed import Answering, Question, Routed
from twostroke.client import Client
from twostroke.rpc.channel import connect
from twostroke.types import SamplingParams, StopConditions
from twostroke.v1 import faults_pb2

PROMPT_TOKENS, ANSWER_TOKENS = 200, 48
ANSWER_SECONDS, RECORD_SECONDS = 40.0, 10.0
DELAY_SECONDS = 0.5
TRIES = 4
FIRST_TOKEN_SECONDS = 0.1  # about; a caller that leaves earlier leaves in the middle of the prompt
_FAULTS = {
    Blow.FAIL: faults_pb2.FAULT_FAIL,
    Blow.DELAY: faults_pb2.FAULT_DELAY,
    Blow.CORRUPT: faults_pb2.FAULT_CORRUPT,
}


@dataclass(frozen=True)
class Outcome:
    """How a case went.

    Attributes:
        recovered: seconds from the blow to the end of the answer.
        freed: seconds from then until nothing was held anywhere.
        attempts: calls to workers that the request took.
    """

    case: Case
    recovered: float
    freed: float
    attempts: int


class PassedByError(Exception):
    """The request had its answer without this message: a prefetch may come too late to be sent."""


class Scene:
    """A cluster in which one case after the other is played."""

    def __init__(self, whole: Processes, alone: Alone, seed: int) -> None:
        self._whole = whole
        self._alone = alone
        self._dice = random.Random(seed)
        self._count = 0

    async def play(self, case: Case) -> Outcome:
        """Play a case, again where the request passed its point by. Raises AssertionError, when something is wrong."""
        for _ in range(TRIES):
            with contextlib.suppress(PassedByError):
                return await self._play(case)
        raise AssertionError(f"in {TRIES} tries the request never came to this point")

    async def _play(self, case: Case) -> Outcome:
        self._count += 1
        for each in self._whole.services:
            each.forget_lines()
        question, name = self._question(), f"case-{self._count}"
        truth = await question.alone(self._alone)
        async with AsyncExitStack() as stack:
            faults = {each: await stack.enter_async_context(_armed(case, each)) for each in self._servers(case)}
            asked = asyncio.create_task(Answering(question).asked(self._client(case), request_id=name))
            stack.push_async_callback(_ended, asked)
            struck = await _first_struck(faults, asked)
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
        await self._whole.settled()
        freed_at = time.monotonic()
        record = await self._record(name)
        assert record["outcome"] == ("cancelled" if case.blow is Blow.CANCEL else "completed"), record
        assert case.blow is Blow.CANCEL or record["completion_tokens"] == ANSWER_TOKENS, record
        self._whole.assert_calm()
        return Outcome(case, answered_at - struck_at, freed_at - answered_at, record["attempts"])

    async def leave(self) -> float:
        """Ask, and leave at some moment; answers the seconds until nothing was held for it anywhere."""
        self._count += 1
        question, name = self._question(), f"left-{self._count}"
        moment = self._dice.choice((None, *range(1, ANSWER_TOKENS)))  # before the first token, or after so many
        changed = asyncio.Event()
        answering = Answering(question, changed.set)
        asked = asyncio.create_task(answering.asked(self._whole.clients[self._whole.router], request_id=name))
        if moment is None:
            await asyncio.wait({asked}, timeout=self._dice.random() * FIRST_TOKEN_SECONDS)
        while moment is not None and answering.least < moment:
            changed.clear()
            await changed.wait()
        await _ended(asked)
        left_at = time.monotonic()
        await self._whole.settled()
        self._whole.assert_calm()
        return time.monotonic() - left_at

    def _question(self) -> Question:
        """One that nobody has asked before."""
        prompt = tuple(self._dice.randrange(256) for _ in range(PROMPT_TOKENS))
        sampling = SamplingParams(temperature=self._dice.choice((0.0, 0.8)), seed=self._count)
        stops = StopConditions(max_tokens=ANSWER_TOKENS, ignore_eos=True)
        return Question(prompt=prompt, stops=stops, sampling=sampling)

    def _servers(self, case: Case) -> list[Service]:
        """Where the fault is armed: in both workers of a kind where one is to replace the other, else in the first."""
        whole = self._whole
        kinds = {"kvstore": [whole.kvstore], "prefill": whole.prefill, "decode": whole.decode}
        servers = kinds[case.point.server]
        return servers if _has_peers(case) else servers[:1]

    def _client(self, case: Case) -> Client:
        """A way in: to all workers, or to the first of each kind, so that it is known who calls whom."""
        return self._whole.clients[self._whole.router if _has_peers(case) else self._whole.lone]

    async def _strike(self, case: Case, struck: Service, asked: asyncio.Task[Routed]) -> None:
        """Deal the blow while the message is held; what fails, waits or lies was struck already.

        A killed process is started again at once, as its supervisor would.
        """
        match case.blow:
            case Blow.KILL_SERVER | Blow.KILL_CALLER:
                callers = {"prefill": self._whole.prefill[0], "decode": self._whole.decode[0]}
                victim = struck if case.blow is Blow.KILL_SERVER else callers[case.point.caller]
                await victim.kill()
                await victim.start()
            case Blow.STOP_SERVER:
                struck.freeze()
            case Blow.CANCEL:
                asked.cancel()
                await asyncio.wait({asked})

    async def _record(self, name: str) -> dict[str, Any]:
        """The one usage record of a request; a caller that left does not see it written."""
        async with asyncio.timeout(RECORD_SECONDS):
            while not self._whole.recorded(name):
                await asyncio.sleep(0.01)
        return self._whole.record(name)


def _has_peers(case: Case) -> bool:
    return case.blow in (Blow.KILL_SERVER, Blow.STOP_SERVER)


@asynccontextmanager
async def _armed(case: Case, server: Service) -> AsyncIterator[Armed]:
    point, channel = case.point, connect(server.address)
    fault = _FAULTS.get(case.blow, faults_pb2.FAULT_HOLD)
    try:
        async with armed(
            channel, point.method, point.moment, fault, field=point.field, skip=point.skip, delay=DELAY_SECONDS
        ) as waiting:
            yield waiting
    finally:
        await channel.close()


async def _first_struck(faults: dict[Service, Armed], asked: asyncio.Task[Routed]) -> Service:
    """The service whose message was struck first."""
    waits = {asyncio.create_task(fault.struck()): service for service, fault in faults.items()}
    try:
        await asyncio.wait({*waits, asked}, return_when=asyncio.FIRST_COMPLETED)
        struck = [service for wait, service in waits.items() if wait.done() and not wait.exception()]
        if not struck:
            await asked  # its own failure, if there is one, says more
            raise PassedByError
        return struck[0]
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)


async def _ended(asked: asyncio.Task[Routed]) -> None:
    asked.cancel()
    await asyncio.wait({asked})
