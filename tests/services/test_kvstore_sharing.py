"""The store's space over real gRPC: whose it is, what is transient, what is waited for, what is advised."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from services.kvstore.settings import StoreSettings
from tests.support.storecalls import LEASE, TEN, WRITER, refusal, whole, writing
from tests.support.stores import KV_FORMAT, copies_held, eventually, keys, named, pages, serving_store, worker
from twostroke import wire
from twostroke.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable, WorkerLost
from twostroke.kv import messages
from twostroke.kv.advice import Kept, StoreAdvice
from twostroke.kv.blocks import TransportChoice
from twostroke.kv.client import KvStoreClient
from twostroke.kv.refs import Terms
from twostroke.settings import InvalidSetting
from twostroke.v1 import kvstore_pb2 as pb

both = pytest.mark.parametrize("transport", [TransportChoice.SHARED_MEMORY, TransportChoice.GRPC])
TRANSIENT = Terms(transient=True)
LONG = 60.0  # longer than a test may take: what waits so long is woken, or the test fails


@both
async def test_a_namespace_never_holds_more_than_its_share(tmp_path: Path, transport: TransportChoice) -> None:
    async with (
        serving_store(tmp_path, slots=16, namespace_share=0.25) as store,
        worker(store, pages(8), transport) as client,
    ):
        for name, first in (("a", 0), ("b", 100)):
            stored = await client.write_blocks(None, named(*range(first, first + 8)), range(8), Terms(namespace=name))
            assert len(stored.refs) == 4
        assert (store.stats.committed, store.stats.namespaces, store.stats.free) == (8, 2, 8)


@both
async def test_a_transient_block_is_read_under_its_lease_and_leaves_nothing(
    tmp_path: Path, transport: TransportChoice
) -> None:
    mine, theirs = pages(2), np.zeros((2, KV_FORMAT.block_bytes), np.uint8)
    async with (
        serving_store(tmp_path) as store,
        worker(store, mine, transport) as writer,
        worker(store, theirs, transport) as reader,
    ):
        stored = await writer.write_blocks(None, named(1, 2), [0, 1], TRANSIENT)
        assert [ref.key for ref in stored.refs] == keys(1, 2)
        assert await reader.lookup(keys(1, 2)) == 0
        assert await reader.lookup(keys(1, 2), stored.lease) == 2
        assert (await reader.read_blocks(None, keys(1, 2), [0, 1])).blocks == 0
        assert (await reader.read_blocks(stored.lease, keys(1, 2), [0, 1])).blocks == 2
        assert np.array_equal(theirs, mine)
        assert store.stats.transient == 2
        writer.release(stored.lease)
        await writer.released()
        assert (store.stats.free, store.stats.namespaces) == (16, 0)


async def test_a_namespace_has_a_bounded_name_and_a_refusal_costs_nothing(tmp_path: Path) -> None:
    async with writing(tmp_path) as caller:
        name, mine = "x" * 129, {"incarnation": caller.incarnation}
        opened = {"lease_id": LEASE, "opens": True, "lease_duration": TEN}
        reserve = pb.ReserveRequest(writer_id=WRITER, keys=keys(1), namespace=name, **opened, **mine)
        first = pb.WriteRequest(namespace=name, **opened, **mine)
        for call in (
            caller.stub.Reserve(reserve, timeout=5),
            caller.stub.Write(iter([first, whole(1)]), timeout=5),
            caller.stub.Keep(pb.KeepRequest(namespace=name, keep_for=TEN, **mine), timeout=5),
            caller.stub.Forget(pb.ForgetRequest(namespace=name, **mine), timeout=5),
        ):
            assert (await refusal(InvalidRequest, call)).field == "namespace"
        assert caller.store.stats.leases == 0
        before = wire.duration_pb(-1.0)
        for field, call in (
            ("at_most", caller.stub.Await(pb.AwaitRequest(at_most=before, **mine), timeout=5)),
            ("keep_for", caller.stub.Keep(pb.KeepRequest(keep_for=before, **mine), timeout=5)),
        ):
            assert (await refusal(InvalidRequest, call)).field == field


async def test_who_waits_for_blocks_learns_at_once_that_they_are_there(tmp_path: Path) -> None:
    async with serving_store(tmp_path, max_keys=3) as store, worker(store, pages(8)) as client:
        waiting = asyncio.create_task(client.await_committed(keys(*range(1, 9)), LONG))
        await eventually(lambda: store.stats.waiting == 1)
        for name in range(8, 0, -1):
            assert not waiting.done()
            await client.write_blocks(None, named(name), [0])
        assert await waiting == 8
        assert await client.await_committed(keys(1, 2), 0.0) == 2
        assert store.stats.waiting == 0


async def test_who_waits_for_a_writer_that_gives_up_learns_it_at_once(tmp_path: Path) -> None:
    async with writing(tmp_path) as caller, KvStoreClient.connect(caller.store.address, lambda: KV_FORMAT) as client:
        await caller.store.blocks.held_within(0.0, [])  # nothing to wait for
        given = messages.reservations((await caller.reserve(1, 2)).reserved)
        waiting = asyncio.create_task(client.await_committed(keys(1, 2, 3), LONG))
        await eventually(lambda: caller.store.stats.waiting == 1)
        abandoned = messages.reservations_pb(given)
        await caller.stub.Abandon(pb.AbandonRequest(incarnation=caller.incarnation, blocks=abandoned[:1]), timeout=5)
        assert await client.lookup(keys(1)) == 0
        assert not waiting.done()
        await caller.stub.Abandon(pb.AbandonRequest(incarnation=caller.incarnation, blocks=abandoned[1:]), timeout=5)
        assert await waiting == 0


async def test_waiting_for_what_nobody_writes_ends_by_time_and_for_what_is_written_with_the_caller(
    tmp_path: Path,
) -> None:
    async with serving_store(tmp_path, max_await_seconds=0.1) as store, worker(store, pages(1)) as client:
        await client.write_blocks(None, named(1), [0])
        assert await client.await_committed(keys(1, 2), LONG) == 1  # the node's own bound
    async with serving_store(tmp_path) as store, worker(store, pages(1)) as client:
        with copies_held(client):
            writing_one = asyncio.create_task(client.write_blocks(None, named(1), [0]))
            await eventually(lambda: store.stats.reserved == 1)
            assert await client.await_committed(keys(1), 0.01) == 0
            soon = asyncio.get_running_loop().time() + 0.05
            with pytest.raises(DeadlineExceeded):
                await client.await_committed(keys(1), LONG, deadline=soon)
            left = asyncio.create_task(client.await_committed(keys(1), LONG))
            await eventually(lambda: store.stats.waiting == 1)
            left.cancel()
            await eventually(lambda: store.stats.waiting == 0)
        await writing_one


async def test_waiting_calls_are_bounded_and_end_with_the_node(tmp_path: Path) -> None:
    async with AsyncExitStack() as life:
        store = await life.enter_async_context(serving_store(tmp_path, max_waiting_calls=1))
        async with KvStoreClient.connect(store.address, lambda: KV_FORMAT) as client:
            waiting = asyncio.create_task(client.await_committed(keys(1), LONG))
            await eventually(lambda: store.stats.waiting == 1)
            with pytest.raises(Overloaded):
                await client.await_committed(keys(1), LONG)
            await life.aclose()
            with pytest.raises((Unavailable, WorkerLost)):
                await waiting


async def test_advice_is_taken_and_counted(tmp_path: Path) -> None:
    async with serving_store(tmp_path, slots=16, max_keys=3) as store, worker(store, pages(16)) as client:
        stored = await client.write_blocks(None, named(*range(1, 7)), range(6))
        client.release(stored.lease)
        await client.released()
        advice = StoreAdvice(client)
        assert await advice.keep("default", keys(*range(1, 7)), 10.0) == Kept(4, 10.0)  # a quarter
        assert await advice.keep("another", keys(1, 2), 10.0) == Kept(0, 10.0)
        for name in range(20, 50):
            stored = await client.write_blocks(None, named(name), [0])
            client.release(stored.lease)
        await client.released()
        assert await client.lookup(keys(1, 2, 3, 4)) == 4
        assert (await client.read_blocks(None, keys(1, 2, 3, 4), range(4))).blocks == 4
        store.clock.now += 10.0
        status = await client.stub.GetStatus(pb.GetStoreStatusRequest(), timeout=5)
        assert (status.kept, status.honoured_keeps, status.expired_keeps) == (0, 4, 4)
        assert status.evictions == 20
        assert await advice.keep("default", keys(1, 2, 3, 4), 1e6) == Kept(4, 600.0)  # no longer than the node likes
        assert store.stats.kept == 4
        assert await advice.keep("default", keys(1, 2, 3, 4), 0.0) == Kept(0, 0.0)
        assert store.stats.kept == 0
        assert await advice.promote("default", keys(1, 2, 60)) == 2  # here already; there is no tier below
        assert await advice.forget("default", keys(*range(30, 50))) == store.stats.committed - 4


@pytest.mark.parametrize(
    "told",
    [
        {"namespace_share": 0.0},
        {"namespace_share": 1.1},
        {"keep_share": -0.1},
        {"max_await_seconds": 61.0},
        {"max_keep_seconds": 0.0},
        {"max_waiting_calls": 0},
    ],
)
def test_settings_that_cannot_be_are_refused(told: dict[str, float]) -> None:
    with pytest.raises(InvalidSetting):
        StoreSettings(**told)  # type: ignore[arg-type]
