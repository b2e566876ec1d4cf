"""A prefill and a decode worker, asked over their contracts, one call at a time, as a router asks them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from services.router.member import Member
from tests.support.alone import Alone
from tests.support.cluster import Cluster
from twostroke.cluster import Role
from twostroke.handoff import DecodeOrder, First, Handover, PrefillOrder, Progress, Written
from twostroke.kv.keys import block_keys, request_root
from twostroke.kv.refs import Lease
from twostroke.telemetry import Telemetry
from twostroke.types import RequestContext, SamplingParams, StopConditions

GREEDY = SamplingParams(temperature=0.0)
STOPS = StopConditions(max_tokens=12, ignore_eos=True)
SPAN = Telemetry(None).span("test")

_numbers = count(1)


@dataclass
class Pair:
    """A worker of each kind, and one engine that has seen nothing."""

    cluster: Cluster
    prefill: Member
    decode: Member
    alone: Alone

    def order(self, prompt: tuple[int, ...], **changes: Any) -> DecodeOrder:
        context = RequestContext(request_id=f"request-{next(_numbers)}")
        order = DecodeOrder(
            context=context, prompt=prompt, emitted=(), sampling=GREEDY, stops=STOPS, choice=0, ticket=None
        )
        return replace(order, **changes)

    def keys(self, order: DecodeOrder) -> tuple[bytes, ...]:
        assert self.decode.info is not None
        kv_format = self.decode.info.kv_format
        return tuple(block_keys(request_root(kv_format.digest, order.context), order.prompt, kv_format.block_tokens))

    def whole(self, order: DecodeOrder) -> PrefillOrder:
        """The order that comes before it."""
        return PrefillOrder(
            context=order.context,
            prompt=order.prompt,
            sampling=order.sampling,
            stops=order.stops,
            lease_id=Lease.named(0).id,
        )

    async def prefilled(self, order: DecodeOrder) -> list[Progress | First | Handover]:
        async with aclosing(self.prefill.prefill(self.whole(order), soon(), SPAN)) as events:
            return [event async for event in events]

    async def handed_over(self, order: DecodeOrder) -> DecodeOrder:
        """The order after its prompt was run: with a first token and a ticket."""
        *_, first, _, handover = await self.prefilled(order)
        assert isinstance(first, First)
        assert isinstance(handover, Handover)
        ((token, _),) = first.tokens
        return replace(order, emitted=(token.id,), ticket=handover.ticket)

    async def decoded(self, order: DecodeOrder) -> list[Written]:
        async with aclosing(self.decode.decode(order, soon(), SPAN)) as news:
            return [written async for written in news]

    async def truth(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        return (await self.alone.answer(prompt, GREEDY, STOPS))[0].ids

    def give_up(self, order: DecodeOrder) -> None:
        """End the lease that came with the ticket."""
        assert order.ticket is not None
        self.cluster.decode[0].store.release(order.ticket.lease)


def soon() -> float:
    return asyncio.get_running_loop().time() + 30


def fresh_prompt(length: int) -> tuple[int, ...]:
    start = next(_numbers)
    return tuple((start * 31 + at * at) % 256 for at in range(length))


def ids(news: list[Written]) -> tuple[int, ...]:
    return tuple(token.id for written in news for token in written.tokens)


@asynccontextmanager
async def paired(cluster: Cluster, alone: Alone) -> AsyncIterator[Pair]:
    """Both workers, introduced; whatever is done inside the block, nothing is held afterwards."""
    known = {member.role: Member(member.address, member.role, 10.0) for member in cluster.doors.fleet.members}
    for member in known.values():
        member.info = await member.introduce()
    yield Pair(cluster, known[Role.PREFILL], known[Role.DECODE], alone)
    for member in known.values():
        await member.close()
    await cluster.settled()
