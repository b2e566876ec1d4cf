"""Workers and nodes that leave, die, restart or are lost to each other: nothing leaks, nothing stale is used."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from services.kvstore.service import KvStoreService
from tests.support.faults import armed
from tests.support.stores import (
    KV_FORMAT,
    WAIT_SECONDS,
    copies_held,
    eventually,
    keys,
    named,
    pages,
    serving_store,
    worker,
)
from twostroke.errors import DeadlineExceeded, InvalidRequest, NotFound, Unavailable, WorkerLost
from twostroke.kv.blocks import BlockStoreClient, TransportChoice
from twostroke.kv.client import KvStoreClient
from twostroke.kv.refs import Lease
from twostroke.kv.transport import Tenancy
from twostroke.kv.transport.calls import StoreCalls
from twostroke.kv.transport.pages import HostPages
from twostroke.rpc.channel import connect
from twostroke.rpc.server import ServerSettings, serving
from twostroke.v1 import faults_pb2
from twostroke.v1.kvstore_pb2_grpc import KvStoreServiceServicer, add_KvStoreServiceServicer_to_server

both = pytest.mark.parametrize("transport", [TransportChoice.SHARED_MEMORY, TransportChoice.GRPC])


DYING = """
import asyncio, sys
import numpy as np
from tests.support.stores import KV_FORMAT, keys, pages
from twostroke.kv.blocks import BlockStoreClient
from twostroke.kv.refs import Lease
from twostroke.kv.transport import Tenancy
from twostroke.kv.transport.calls import StoreCalls
from twostroke.kv.transport.pages import HostPages

async def main():
    async with BlockStoreClient.opened(sys.argv[1], KV_FORMAT, HostPages(pages(3))) as client:
        await StoreCalls(client, await client.attached()).reserve(Tenancy(Lease.named(60.0)), keys(1, 2, 3), None)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_cancelled_write_waits_for_its_copy_and_leaves_nothing_reserved_or_leased(tmp_path: Path) -> None:
    async with serving_store(tmp_path) as store, worker(store, pages(4)) as client:
        with copies_held(client) as go:
            writing = asyncio.create_task(client.write_blocks(None, named(1, 2), [0, 1]))
            await eventually(lambda: store.stats.reserved == 2)
            for _ in range(3):
                writing.cancel()
                assert await client.lookup(keys(1)) == 0  # the loop goes on
            assert not writing.done()
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await writing
        await client.released()
        assert store.idle


async def test_a_cancelled_read_keeps_its_pages_until_its_copy_has_ended(tmp_path: Path) -> None:
    rows = pages(2)
    async with serving_store(tmp_path) as store, worker(store, rows) as client:
        stored = await client.write_blocks(None, named(1), [0])
        with copies_held(client) as go:
            reading = asyncio.create_task(client.read_blocks(None, keys(1), [1]))
            await eventually(lambda: store.stats.leases == 2)
            reading.cancel()
            await client.renew(stored.lease)
            assert not reading.done()
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await reading
        client.release(stored.lease)
        await client.released()
        assert store.idle


async def test_a_transport_that_was_replaced_is_closed_behind_its_last_transfer(tmp_path: Path) -> None:
    rows = pages(4)
    async with serving_store(tmp_path) as store, worker(store, rows) as client:
        old = await client.attached()
        with copies_held(client) as go:
            writing = asyncio.create_task(client.write_blocks(None, named(1), [0]))
            await eventually(lambda: store.stats.reserved == 1)
            client.forget(old)
            assert len((await client.write_blocks(None, named(2), [1])).refs) == 1  # by another thread and name
            assert (await client.attached()).writer_id != old.writer_id
            assert store.blocks.arena.writer_lives(old.writer_id)
            go.set()
            assert len((await writing).refs) == 1
        assert not store.blocks.arena.writer_lives(old.writer_id)
        assert await client.lookup(keys(1, 2)) == 2


async def test_slots_whose_answer_was_lost_return_though_the_worker_lives_on(tmp_path: Path) -> None:
    async with serving_store(tmp_path) as store, worker(store, pages(2)) as client:
        node = await client.attached()
        # Nobody will ever commit these.
        await StoreCalls(client, node).reserve(Tenancy(Lease.named(10.0)), keys(1, 2), None)
        store.clock.now += 30.0
        store.blocks.reclaim()
        assert store.stats.quarantined == 2
        client.forget(node)  # what the transport does when it does not know whether the node took a call
        assert len((await client.write_blocks(None, named(1), [0])).refs) == 1
        store.blocks.reclaim()
        assert (store.stats.quarantined, store.stats.free) == (0, 15)


async def test_a_writer_that_is_killed_while_it_copies_gives_its_slots_back(tmp_path: Path) -> None:
    async with serving_store(tmp_path) as store:
        store.node.attach(KV_FORMAT, "")
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", DYING, store.address)
        try:
            await eventually(lambda: store.stats.reserved == 3)
            store.clock.now += 30.0
            store.blocks.reclaim()
            assert store.stats.quarantined == 3  # late, but alive: it may be copying still
        finally:
            process.kill()
            await process.wait()
        store.blocks.reclaim()
        assert store.stats.free == store.stats.slots
        assert store.files() == store.own_files


async def attached_again(client: KvStoreClient) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            try:
                await client.lookup(keys(1))
            except Unavailable:
                await asyncio.sleep(0.02)
            else:
                return


@both
async def test_after_a_restart_old_leases_are_misses_and_the_worker_attaches_by_itself(
    tmp_path: Path, transport: TransportChoice
) -> None:
    rows = pages(2)
    async with AsyncExitStack() as life:
        first = await life.enter_async_context(serving_store(tmp_path))
        async with worker(first, rows, transport) as client:
            stored = await client.write_blocks(None, named(1), [0])
            await life.aclose()
            with pytest.raises(Unavailable):
                await client.lookup(keys(1))
            with pytest.raises(Unavailable):
                await client.write_blocks(stored.lease, named(2), [0])
            async with serving_store(tmp_path, listen=first.address) as second:
                await attached_again(client)
                for call in (client.read_blocks(stored.lease, keys(1), [1]), client.renew(stored.lease)):
                    with pytest.raises(NotFound):
                        await call
                assert (await client.read_blocks(None, keys(1), [1])).blocks == 0
                assert len((await client.write_blocks(None, named(1), [0])).refs) == 1
                assert (await client.attached()).incarnation == second.node.incarnation


async def test_a_node_that_cannot_be_reached_fails_calls_without_trying_each_time(tmp_path: Path) -> None:
    async with serving_store(tmp_path) as store:
        address = store.address
    async with BlockStoreClient.opened(address, KV_FORMAT, HostPages(pages(1))) as client:
        refusals = await asyncio.gather(*(client.lookup(keys(1)) for _ in range(50)), return_exceptions=True)
        assert {type(each) for each in refusals} <= {Unavailable, WorkerLost}
        assert sum("a moment ago" in str(each) for each in refusals) >= 49
        async with serving_store(tmp_path, listen=address):
            await attached_again(client)


@both
async def test_a_call_whose_time_is_up_ends_by_type_and_the_client_goes_on(
    tmp_path: Path, transport: TransportChoice
) -> None:
    async with serving_store(tmp_path) as store, worker(store, pages(1), transport) as client:
        node = await client.attached()
        past = asyncio.get_running_loop().time() - 1.0
        for call in (
            client.lookup(keys(1), deadline=past),
            client.write_blocks(None, named(1), [0], deadline=past),
            client.read_blocks(None, keys(1), [0], deadline=past),
        ):
            with pytest.raises(DeadlineExceeded):
                await call
        assert len((await client.write_blocks(None, named(1), [0])).refs) == 1
        assert (store.stats.reserved, store.stats.leases) == (0, 1)
        if transport is TransportChoice.SHARED_MEMORY:  # the node might have taken the call: another name from now on
            assert (await client.attached()).writer_id != node.writer_id


@both
async def test_a_write_that_is_refused_after_its_copy_gives_its_slots_back(
    tmp_path: Path, transport: TransportChoice
) -> None:
    async with serving_store(tmp_path) as store, worker(store, pages(2), transport) as client:
        with pytest.raises(InvalidRequest):
            await client.write_blocks(None, named(1, 2, tokens=17), [0, 1])
        await client.released()
        assert (store.stats.free, store.stats.reserved, store.stats.leases) == (16, 0, 0)


async def test_a_lease_that_was_given_survives_a_transfer_that_fails_under_it(tmp_path: Path) -> None:
    async with serving_store(tmp_path) as store, worker(store, pages(2)) as client:
        stored = await client.write_blocks(None, named(1), [0])
        with pytest.raises(InvalidRequest):
            await client.write_blocks(stored.lease, named(2, tokens=17), [1])
        await client.renew(stored.lease)
        assert (store.stats.leased_blocks, store.stats.leases) == (1, 1)


class Silent(KvStoreServiceServicer):
    """Takes introductions and never answers."""

    full_name = "twostroke.v1.KvStoreService"

    def register(self, server: grpc.aio.Server) -> None:
        add_KvStoreServiceServicer_to_server(self, server)

    async def Attach(self, request: object, context: object) -> object:
        return await asyncio.Event().wait()


async def test_a_node_that_never_answers_is_no_store_and_costs_a_caller_no_more_than_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(ServerSettings(drain_seconds=0.0), Silent()) as server:
        with monkeypatch.context() as quick:
            quick.setattr("twostroke.kv.client.CALL_SECONDS", 0.05)
            async with BlockStoreClient.opened(
                server.address, KV_FORMAT, HostPages(pages(1))
            ) as client:  # starts all the same
                with pytest.raises(Unavailable, match="a moment ago"):
                    await client.lookup(keys(1))
        async with KvStoreClient.connect(server.address, lambda: KV_FORMAT) as client:
            soon = asyncio.get_running_loop().time() + 0.05
            found = await asyncio.gather(
                *(client.lookup(keys(1), deadline=soon) for _ in range(5)), return_exceptions=True
            )
            assert {type(each) for each in found} == {DeadlineExceeded}  # those that wait for another's attempt too


async def test_a_silent_node_costs_one_caller_the_time_of_a_call_and_the_next_ones_none(tmp_path: Path) -> None:
    async with (
        serving_store(tmp_path) as store,
        serving(ServerSettings(fault_points=True, drain_seconds=1.0), KvStoreService(store.node)) as server,
        KvStoreClient.connect(server.address, lambda: KV_FORMAT) as client,
    ):
        channel = connect(server.address)
        hold = (faults_pb2.MOMENT_CALLED, faults_pb2.FAULT_HOLD)
        assert await client.lookup(keys(1)) == 0
        async with armed(channel, "KvStoreService/Lookup", *hold, strikes=2) as fault:
            with pytest.raises(Unavailable, match="does not answer"):
                await client.lookup(keys(1))
            assert await fault.struck() == 1
            for _ in range(20):
                with pytest.raises(Unavailable, match="a moment ago"):
                    await client.lookup(keys(1))
            fault.disarm()
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                with contextlib.suppress(Unavailable):
                    assert await client.lookup(keys(1)) == 0
                    break
                await asyncio.sleep(0.01)
        await channel.close()


async def test_a_caller_that_is_short_of_time_does_not_make_the_node_silent(tmp_path: Path) -> None:
    async with (
        serving_store(tmp_path) as store,
        serving(ServerSettings(fault_points=True, drain_seconds=1.0), KvStoreService(store.node)) as server,
        KvStoreClient.connect(server.address, lambda: KV_FORMAT) as client,
    ):
        channel = connect(server.address)
        await client.attached()
        async with armed(channel, "KvStoreService/Lookup", faults_pb2.MOMENT_CALLED, faults_pb2.FAULT_HOLD):
            with pytest.raises(DeadlineExceeded):
                await client.lookup(keys(1), deadline=asyncio.get_running_loop().time() + 0.2)
        assert await client.lookup(keys(1)) == 0
        await channel.close()
