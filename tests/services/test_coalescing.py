"""Orders of one worker that need the same blocks: each block comes in once and goes out once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from services.router.member import Member
from tests.support.alone import Alone
from tests.support.cluster import Cluster, Shape, started, tiny_model
from twostroke.cluster import Role
from twostroke.errors import Unavailable
from twostroke.handoff import DecodeOrder, Handover, PrefillOrder, Ticket, Written
from twostroke.kv.blocks import TransportChoice
from twostroke.kv.refs import ORDINARY, Lease
from twostroke.kv.transport.pages import Row
from twostroke.telemetry import Telemetry
from twostroke.types import RequestContext, SamplingParams, StopConditions
from twostroke.worker.loading import Prefix, load_prefix
from twostroke.worker.worker import Worker

GREEDY = SamplingParams(temperature=0.0)
STOPS = StopConditions(max_tokens=12, ignore_eos=True)
SPAN = Telemetry(None).span("test")
PROMPT = tuple((at * at + 7) % 251 for at in range(2_001))
BLOCKS = 126  # the last one has one token

both = pytest.mark.parametrize("transport", [TransportChoice.SHARED_MEMORY, TransportChoice.GRPC])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


class Traffic:
    """What moves between a worker's pages and its store, and a gate in the way of what comes in."""

    def __init__(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken_in = self.sent_out = self.broken = 0
        self.entered, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        pages = worker.store._pages
        self._read, self._write = pages.read, pages.write
        monkeypatch.setattr(pages, "read", self.read)
        monkeypatch.setattr(pages, "write", self.write)

    def read(self, pages: Sequence[int], take: Callable[[int, Row], None]) -> None:
        if self.broken:
            self.broken -= 1
            raise Unavailable("broken")
        self.sent_out += len(pages)
        self._read(pages, take)

    def write(self, pages: Sequence[int], put: Callable[[int, Row], bool]) -> int:
        self.entered.set()
        assert self.gate.wait(30)
        whole = self._write(pages, put)
        self.taken_in += whole
        return whole


@asynccontextmanager
async def member(cluster: Cluster, role: Role) -> AsyncIterator[Member]:
    """A worker, introduced."""
    (address,) = (each.address for each in cluster.doors.fleet.members if each.role is role)
    known = Member(address, role, 10.0)
    known.info = await known.introduce()
    yield known
    await known.close()


def soon() -> float:
    return asyncio.get_running_loop().time() + 30


async def ticket_of(prefill: Member, number: int) -> Ticket | None:
    context = RequestContext(request_id=f"request-{number}")
    order = PrefillOrder(context=context, prompt=PROMPT, sampling=GREEDY, stops=STOPS, lease_id=Lease.named(0).id)
    async with aclosing(prefill.prefill(order, soon(), SPAN)) as events:
        (ticket,) = [event.ticket async for event in events if isinstance(event, Handover)]
    return ticket


def given_up(worker: Worker, tickets: Sequence[Ticket | None]) -> None:
    for ticket in tickets:
        if ticket is not None:
            worker.store.release(ticket.lease)


@both
async def test_every_ticket_of_identical_prompts_names_all_blocks_and_each_is_written_once(
    model: Path, transport: TransportChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(Shape(model=model, transport=transport)) as cluster, member(cluster, Role.PREFILL) as prefill:
        traffic = Traffic(cluster.prefill[0], monkeypatch)
        tickets = await asyncio.gather(*(ticket_of(prefill, number) for number in range(8)))
        assert [len(ticket.blocks) if ticket else 0 for ticket in tickets] == [BLOCKS] * 8
        assert len({ticket.lease.id for ticket in tickets if ticket}) == 8
        assert (traffic.sent_out, cluster.node.stats().committed) == (BLOCKS, BLOCKS)
        given_up(cluster.prefill[0], tickets)


async def test_when_the_first_writer_fails_the_others_write_its_blocks(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(Shape(model=model)) as cluster, member(cluster, Role.PREFILL) as prefill:
        traffic = Traffic(cluster.prefill[0], monkeypatch)
        traffic.broken = 1
        tickets = await asyncio.gather(*(ticket_of(prefill, number) for number in range(4)))
        assert sorted(len(ticket.blocks) if ticket else 0 for ticket in tickets) == [0, BLOCKS, BLOCKS, BLOCKS]
        assert cluster.node.stats().committed == BLOCKS
        given_up(cluster.prefill[0], tickets)


@both
async def test_four_choices_of_one_ticket_load_its_blocks_once(
    model: Path, transport: TransportChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        Alone.started(model) as alone,
        started(Shape(model=model, transport=transport)) as cluster,
        member(cluster, Role.PREFILL) as prefill,
        member(cluster, Role.DECODE) as decode,
    ):
        traffic, ticket = Traffic(cluster.decode[0], monkeypatch), await ticket_of(prefill, 0)
        (truth,) = await alone.answer(PROMPT, GREEDY, STOPS)
        context = RequestContext(request_id="choices")
        order = DecodeOrder(
            context=context,
            prompt=PROMPT,
            emitted=truth.ids[:1],
            sampling=GREEDY,
            stops=STOPS,
            choice=0,
            ticket=ticket,
        )

        async def decoded(choice: int) -> list[Written]:
            async with aclosing(decode.decode(replace(order, choice=choice), soon(), SPAN)) as news:
                return [written async for written in news]

        answers = await asyncio.gather(*(decoded(choice) for choice in range(4)))
        assert traffic.taken_in == BLOCKS
        for news in answers:
            assert tuple(token.id for written in news for token in written.tokens) == truth.ids[1:]
            assert news[0].admitted is not None
            assert news[0].admitted.store > 0
        given_up(cluster.decode[0], [ticket])


async def test_an_order_that_leaves_a_transfer_does_not_end_it_for_the_others(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(Shape(model=model)) as cluster, member(cluster, Role.PREFILL) as prefill:
        ticket, worker = await ticket_of(prefill, 0), cluster.decode[0]
        assert ticket is not None
        traffic = Traffic(worker, monkeypatch)
        traffic.gate.clear()
        keys, tokens = [ref.key for ref in ticket.blocks], [ref.tokens for ref in ticket.blocks]

        def load(count: int) -> asyncio.Task[Prefix]:
            return asyncio.create_task(
                load_prefix(worker, keys[:count], tokens[:count], worker.store.new_lease(), ORDINARY, deadline=soon())
            )

        first = load(100)
        await asyncio.to_thread(traffic.entered.wait, 30)
        others = [load(100), load(50), load(BLOCKS)]
        await worker.engine.idle()
        first.cancel()
        await asyncio.wait({first})
        traffic.gate.set()
        given = await asyncio.gather(*others)
        assert first.cancelled()
        assert [(each.local, each.joined, each.loaded) for each in given] == [(0, 100, 0), (0, 50, 0), (0, 100, 26)]
        assert traffic.taken_in == BLOCKS
        assert await worker.engine.cached_blocks(keys) == BLOCKS
        for each in given:
            worker.store.release(each.lease)
        given_up(worker, [ticket])


async def test_when_a_transfer_fails_one_that_waited_makes_its_own(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(Shape(model=model)) as cluster, member(cluster, Role.PREFILL) as prefill:
        ticket, worker = await ticket_of(prefill, 0), cluster.decode[0]
        assert ticket is not None
        traffic = Traffic(worker, monkeypatch)
        traffic.gate.clear()
        keys, tokens = [ref.key for ref in ticket.blocks], [ref.tokens for ref in ticket.blocks]
        write, failing = traffic._write, [True]

        def fail_once(pages: Sequence[int], put: Callable[[int, Row], bool]) -> int:
            if failing:
                failing.clear()
                raise Unavailable("broken")
            return write(pages, put)

        traffic._write = fail_once
        first = asyncio.create_task(load_prefix(worker, keys, tokens, ticket.lease, ORDINARY, deadline=soon()))
        await asyncio.to_thread(traffic.entered.wait, 30)
        second = asyncio.create_task(load_prefix(worker, keys, tokens, ticket.lease, ORDINARY, deadline=soon()))
        await worker.engine.idle()
        traffic.gate.set()
        assert (await first).blocks == 0
        assert (await second).loaded == BLOCKS
        given_up(worker, [ticket])
