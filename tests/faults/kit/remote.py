"""The kit in a cluster of your own: the cases that need no hold of its processes, held to what it answers undisturbed.

Its prefill, decode and store processes must run with --fault-points, and nobody else should use it meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Self, TypeGuard

import grpc

from tests.faults.kit.disk import DiskCase, Phase
from tests.faults.kit.node import StoreNode
from tests.faults.kit.points import Case
from tests.faults.kit.redis import RedisCase
from tests.faults.kit.stage import ANSWER_SECONDS, ANSWER_TOKENS, PROMPT_TOKENS, Outcome
from tests.faults.kit.strikes import Blow, PassedByError, aimed, ended, first_struck
from tests.support.alone import Told
from tests.support.routed import Answering, Question, Routed
from tests.support.settling import Address, settled
from twostroke.client import Client
from twostroke.cluster import Role
from twostroke.types import SamplingParams, StopConditions

FAR_BLOWS = (Blow.FAIL, Blow.FULL, Blow.LOSE, Blow.DELAY, Blow.CORRUPT, Blow.CANCEL)
RETURN_SECONDS = 90.0  # of a disk: three times what it is left alone by default
FIND_SECONDS = 20.0  # until all workers have told where their stores are
TRIES = 2  # of each process
SETTLE_SECONDS = 120.0  # twice what a lease and a lost reservation live by default


class NotAimedError(Exception):
    """The cluster cannot be struck; says what to do."""


def is_far(case: Case | DiskCase | RedisCase) -> TypeGuard[Case | DiskCase]:
    """Whether a case needs no hold of processes: nothing is killed, stopped or started again, nor stood between."""
    if isinstance(case, RedisCase):
        return False
    return case.blow in FAR_BLOWS and (isinstance(case, Case) or case.phase is Phase.WRITTEN)


@dataclass(frozen=True)
class Remote:
    """A cluster behind its router.

    Attributes:
        servers: processes to strike, by kind.
        tie: another token may come where the best was likelier than the second by at most this, in natural log:
            kernels round differently where a prompt is computed in other pieces.
    """

    client: Client
    servers: dict[str, list[Address]]
    tie: float
    dice: random.Random

    @classmethod
    @asynccontextmanager
    async def reached(cls, router: str, api_key: str | None, tie: float, seed: int) -> AsyncIterator[Self]:
        """Find everything through the router. Raises NotAimedError."""
        async with Client(router, api_key=api_key) as client:
            try:
                async with asyncio.timeout(FIND_SECONDS):
                    while not all((servers := await _servers(client)).values()):
                        await asyncio.sleep(0.1)
            except TimeoutError:
                raise NotAimedError(f"the router at {router} does not know all of {servers}") from None
            yield cls(client, servers, tie, random.Random(f"remote {seed} {time.time_ns()}"))

    async def play(self, case: Case | DiskCase) -> Outcome | None:
        """Play a case; None where every request passed its point by. Raises AssertionError, NotAimedError.

        One process is struck, and nobody knows which one will be asked: so each is tried.
        """
        kind = "kvstore" if isinstance(case, DiskCase) else case.point.server
        try:
            for server in TRIES * self.servers[kind]:
                if isinstance(case, DiskCase) and not (await StoreNode(server).status()).HasField("disk"):
                    continue
                with contextlib.suppress(PassedByError):
                    return await self._play(case, server)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise NotAimedError("start prefill, decode and store processes with --fault-points") from error
            raise
        return None

    async def leave(self) -> float:
        """Ask, and leave after some tokens; answers the seconds until nothing was held anywhere."""
        changed, moment = asyncio.Event(), self.dice.randrange(ANSWER_TOKENS)
        answering = Answering(self._question(), changed.set)
        asked = asyncio.create_task(answering.asked(self.client))
        while answering.least < moment:
            changed.clear()
            await changed.wait()
        await ended(asked)
        left_at = time.monotonic()
        await self._settled()
        return time.monotonic() - left_at

    async def _play(self, case: Case | DiskCase, server: Address) -> Outcome:
        question = self._question()
        (truth,) = (await Answering(question).asked(self.client, cache_salt="apart")).choices
        await self._settled()
        async with AsyncExitStack() as stack:
            fault = await stack.enter_async_context(aimed(server.address, case))
            asked = asyncio.create_task(Answering(question).asked(self.client))
            stack.push_async_callback(ended, asked)
            await first_struck({server: fault}, asked, behind=isinstance(case, DiskCase))
            struck_at = time.monotonic()
            if case.blow is not Blow.CANCEL:
                async with asyncio.timeout(ANSWER_SECONDS):
                    self._judge(await asked, truth)
            else:
                await ended(asked)
            answered_at = time.monotonic()
        await self._settled()
        freed_at = time.monotonic()
        returned = await self._on_again(server) - struck_at if isinstance(case, DiskCase) else None
        return Outcome(
            name=case.name,
            blow=case.blow.value,
            recovered=answered_at - struck_at,
            freed=freed_at - answered_at,
            returned=returned,
        )

    def _question(self) -> Question:
        prompt = tuple(self.dice.randrange(256) for _ in range(PROMPT_TOKENS))
        stops = StopConditions(max_tokens=ANSWER_TOKENS, ignore_eos=True)
        return Question(prompt=prompt, stops=stops, sampling=SamplingParams(temperature=0.0, logprobs=2))

    def _judge(self, routed: Routed, truth: Told) -> None:
        """Token for token, up to the first that was nearly another one: what follows it is another text."""
        (told,) = routed.choices
        assert len(told.ids) == routed.usage.completion_tokens == ANSWER_TOKENS, f"{len(told.ids)} tokens came"
        for mine, theirs in zip(told.tokens, truth.tokens, strict=True):
            if mine.id != theirs.id:
                (_, best), (_, second) = theirs.top
                assert best - second <= self.tie, (
                    f"another token came, where the best was likelier by e^{best - second:.3f}"
                )
                return

    async def _settled(self) -> None:
        await settled((*self.servers["prefill"], *self.servers["decode"]), self.servers["kvstore"], SETTLE_SECONDS)

    async def _on_again(self, store: Address) -> float:
        """When the store's disk is on, which it comes to be by itself, with a later write."""
        node = StoreNode(store)
        async with asyncio.timeout(RETURN_SECONDS):
            while not (await node.status()).disk.on:
                await Answering(self._question()).asked(self.client)
        return time.monotonic()


async def _servers(client: Client) -> dict[str, list[Address]]:
    """What the router knows, by kind."""
    workers = (await client.status()).workers
    servers = {
        role.value: [Address(each.address) for each in workers if each.info and each.info.role is role] for role in Role
    }
    servers["kvstore"] = [Address(each) for each in sorted({worker.load.store for worker in workers} - {""})]
    return servers
