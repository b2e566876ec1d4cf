"""Workers that compute the same new prompt at once: each block is written once, and every ticket names all of them."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from services.router.member import Member
from tests.support.cluster import Cluster, Shape, started, tiny_model
from tests.support.stores import eventually
from twostroke.cluster import Role
from twostroke.handoff import Handover, PrefillOrder, Ticket
from twostroke.kv.blocks import TransportChoice
from twostroke.kv.keys import block_keys
from twostroke.kv.refs import Lease
from twostroke.kv.transport.pages import Row
from twostroke.telemetry import Telemetry
from twostroke.types import RequestContext, SamplingParams, StopConditions
from twostroke.worker.worker import Worker

STOPS = StopConditions(max_tokens=12, ignore_eos=True)
SPAN = Telemetry(None).span("test")
PROMPT = tuple((at * at + 7) % 251 for at in range(401))
BLOCKS = 26  # the last one has one token

# A worker that reserves slots for the named blocks, and copies for ever.
STUCK = """
import asyncio, sys
import numpy as np
from twostroke import wire
from twostroke.kv.blocks import BlockStoreClient
from twostroke.kv.refs import Lease
from twostroke.kv.transport import Tenancy
from twostroke.kv.transport.calls import StoreCalls
from twostroke.kv.transport.pages import HostPages
from twostroke.rpc.channel import connect
from twostroke.v1.kvstore_pb2 import GetStoreStatusRequest
from twostroke.v1.kvstore_pb2_grpc import KvStoreServiceStub

async def main(address, *keys):
    async with connect(address) as channel:
        status = await KvStoreServiceStub(channel).GetStatus(GetStoreStatusRequest(), timeout=5)
    kv_format = wire.kv_format(status.format)
    pages = HostPages(np.zeros((1, kv_format.block_bytes), dtype=np.uint8))
    async with BlockStoreClient.opened(address, kv_format, pages) as client:
        tenancy = Tenancy(Lease.named(1.0))
        await StoreCalls(client, await client.attached()).reserve(tenancy, [bytes.fromhex(key) for key in keys], None)
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


class Copies:
    """Blocks that leave a worker's pages, and a gate in their way."""

    def __init__(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent_out = 0
        self.entered, self.gate = threading.Event(), threading.Event()
        self._read = worker.store._pages.read
        monkeypatch.setattr(worker.store._pages, "read", self.read)

    def read(self, pages: Sequence[int], take: Callable[[int, Row], None]) -> None:
        self.entered.set()
        assert self.gate.wait(30)
        self.sent_out += len(pages)
        self._read(pages, take)


@asynccontextmanager
async def members(cluster: Cluster) -> AsyncIterator[list[Member]]:
    """The prefill workers, introduced, in the order in which they were started."""
    addresses = [each.address for each in cluster.doors.fleet.members if each.role is Role.PREFILL]
    known = [Member(address, Role.PREFILL, 10.0) for address in addresses]
    for each in known:
        each.info = await each.introduce()
    yield known
    for each in known:
        await each.close()


async def ticket_of(prefill: Member, name: str) -> Ticket:
    order = PrefillOrder(
        context=RequestContext(request_id=name),
        prompt=PROMPT,
        sampling=SamplingParams(temperature=0.0),
        stops=STOPS,
        lease_id=Lease.named(1.0).id,
    )
    deadline = asyncio.get_running_loop().time() + 30
    async with aclosing(prefill.prefill(order, deadline, SPAN)) as events:
        (ticket,) = [event.ticket async for event in events if isinstance(event, Handover)]
    assert ticket is not None
    return ticket


async def test_the_second_worker_waits_for_the_first_and_both_tickets_name_all_blocks(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(Shape(model=model, prefill=2)) as cluster, members(cluster) as (first, second):
        slow, quick = (Copies(worker, monkeypatch) for worker in cluster.prefill)
        quick.gate.set()
        writing = asyncio.create_task(ticket_of(first, "first"))
        await eventually(slow.entered.is_set)
        waiting = asyncio.create_task(ticket_of(second, "second"))
        await eventually(lambda: cluster.node.stats().waiting == 1)
        slow.gate.set()
        tickets = await asyncio.gather(writing, waiting)
        assert [len(ticket.blocks) for ticket in tickets] == [BLOCKS, BLOCKS]
        assert tickets[0].blocks == tickets[1].blocks
        assert (slow.sent_out, quick.sent_out, cluster.node.stats().committed) == (BLOCKS, 0, BLOCKS)
        given_up(cluster, tickets)


@pytest.mark.parametrize("transport", [TransportChoice.SHARED_MEMORY, TransportChoice.GRPC])
async def test_workers_at_once_never_end_with_fewer_blocks(model: Path, transport: TransportChoice) -> None:
    shape = Shape(model=model, prefill=2, transport=transport, max_chunk=64)
    async with started(shape) as cluster, members(cluster) as workers:
        tickets = await asyncio.gather(*(ticket_of(each, f"{at}") for at, each in enumerate(workers * 2)))
        assert [len(ticket.blocks) for ticket in tickets] == [BLOCKS] * 4
        assert cluster.node.stats().committed == BLOCKS
        given_up(cluster, tickets)


async def test_what_a_worker_that_is_killed_had_reserved_is_written_by_who_waits_for_it(model: Path) -> None:
    async with started(Shape(model=model)) as cluster, members(cluster) as (prefill,):
        worker = cluster.prefill[0]
        keys = block_keys(worker.root(RequestContext(request_id="any")), PROMPT, worker.kv_format.block_tokens)
        names = [key.hex() for key in keys[:20]]
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", STUCK, cluster.kvstore, *names)
        try:
            await eventually(lambda: cluster.node.stats().reserved == 20)
            waiting = asyncio.create_task(ticket_of(prefill, "request"))
            await eventually(lambda: cluster.node.stats().waiting == 1)
        finally:
            process.kill()
            await process.wait()
        ticket = await waiting
        assert len(ticket.blocks) == BLOCKS
        assert (cluster.node.stats().committed, cluster.node.stats().reserved) == (BLOCKS, 0)
        given_up(cluster, [ticket])


async def test_a_worker_that_is_stuck_delays_who_waits_for_it_and_no_more(model: Path) -> None:
    async with started(Shape(model=model)) as cluster, members(cluster) as (prefill,):
        worker = cluster.prefill[0]
        keys = block_keys(worker.root(RequestContext(request_id="any")), PROMPT, worker.kv_format.block_tokens)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", STUCK, cluster.kvstore, keys[20].hex())
        try:
            await eventually(lambda: cluster.node.stats().reserved == 1)
            ticket = await ticket_of(prefill, "request")
            assert len(ticket.blocks) == 20  # the rest is computed again
            given_up(cluster, [ticket])
        finally:
            process.kill()
            await process.wait()
        again = await ticket_of(prefill, "again")
        assert len(again.blocks) == BLOCKS
        given_up(cluster, [again])


def given_up(cluster: Cluster, tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        cluster.prefill[0].store.release(ticket.lease)
