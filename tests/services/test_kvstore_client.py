"""BlockStoreClient against real nodes, through shared memory and through streams."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.support.stores import (
    KV_FORMAT,
    WAIT_SECONDS,
    key,
    keys,
    named,
    pages,
    serving_store,
    shared_memory,
    worker,
)
from twostroke.errors import FormatMismatch, NotFound, Unavailable
from twostroke.kv.blocks import BlockStoreClient, TransportChoice
from twostroke.kv.client import KvStoreClient
from twostroke.kv.format import KvFormat
from twostroke.kv.refs import Lease
from twostroke.kv.transport.pages import HostPages

both = pytest.mark.parametrize("transport", [TransportChoice.SHARED_MEMORY, TransportChoice.GRPC])


@both
async def test_what_one_worker_writes_another_reads_byte_for_byte(tmp_path: Path, transport: TransportChoice) -> None:
    mine, theirs = pages(6), np.zeros((6, KV_FORMAT.block_bytes), np.uint8)
    async with (
        serving_store(tmp_path) as store,
        worker(store, mine, transport) as writer,
        worker(store, theirs, transport) as reader,
    ):
        stored = await writer.write_blocks(None, [*named(1, 2), (key(3), 5)], [4, 0, 2])
        assert [(ref.key, ref.tokens) for ref in stored.refs] == [(key(1), 16), (key(2), 16), (key(3), 5)]
        loaded = await reader.read_blocks(stored.lease, keys(1, 2, 3), [1, 3, 5])
        assert loaded.blocks == 3
        assert np.array_equal(theirs[[1, 3, 5]], mine[[4, 0, 2]])
        assert not theirs[[0, 2, 4]].any()
        writer.release(stored.lease)
        await writer.released()
        assert store.idle


@both
async def test_a_read_ends_at_the_first_block_that_is_not_held(tmp_path: Path, transport: TransportChoice) -> None:
    async with serving_store(tmp_path) as store, worker(store, pages(4), transport) as client:
        await client.write_blocks(None, named(1, 2, 4), [0, 1, 3])
        assert await client.lookup(keys(1, 2, 3, 4)) == 2
        assert (await client.read_blocks(None, keys(1, 2, 3, 4), [0, 1, 2, 3])).blocks == 2
        assert (await client.read_blocks(None, keys(3), [0])).blocks == 0


@both
async def test_a_transfer_may_name_more_blocks_than_a_call_takes(tmp_path: Path, transport: TransportChoice) -> None:
    rows = pages(16)
    async with serving_store(tmp_path, max_keys=3) as store, worker(store, rows, transport) as client:
        before = rows.copy()
        stored = await client.write_blocks(None, named(*range(1, 9)), range(8))
        assert [ref.key for ref in stored.refs] == keys(*range(1, 9))
        assert await client.lookup(keys(*range(1, 9))) == 8
        loaded = await client.read_blocks(stored.lease, keys(*range(1, 10)), range(7, 16))
        assert loaded.blocks == 8
        assert np.array_equal(rows[7:15], before[:8])
        assert store.stats.leases == 1


@both
async def test_two_writers_of_one_prompt_store_each_block_once(tmp_path: Path, transport: TransportChoice) -> None:
    rows = pages(8)
    async with serving_store(tmp_path) as store, worker(store, rows, transport) as one, worker(store, rows) as two:
        await asyncio.gather(*(each.write_blocks(None, named(*range(1, 9)), range(8)) for each in (one, two)))
        assert store.stats.committed == 8
        assert (store.stats.reserved, store.stats.free) == (0, 8)
        again = await one.write_blocks(None, named(*range(1, 9)), range(8))
        assert sorted(ref.key for ref in again.refs) == sorted(keys(*range(1, 9)))


@both
async def test_a_full_store_never_waits_and_names_fewer_blocks(tmp_path: Path, transport: TransportChoice) -> None:
    async with serving_store(tmp_path, slots=16) as store, worker(store, pages(20), transport) as client:
        first = await client.write_blocks(None, named(*range(1, 13)), range(12))
        second = await client.write_blocks(None, named(*range(21, 29)), range(8))
        assert [ref.key for ref in second.refs] == keys(21, 22, 23, 24)
        client.release(first.lease)
        await client.released()
        third = await client.write_blocks(None, named(*range(31, 39)), range(8))
        assert len(third.refs) == 8


@both
async def test_a_read_under_a_lease_that_has_ended_fails_and_never_uses_what_lies_there(
    tmp_path: Path, transport: TransportChoice
) -> None:
    rows = pages(4)
    async with serving_store(tmp_path, slots=16) as store, worker(store, rows, transport) as client:
        stored = await client.write_blocks(None, named(1), [0])
        store.clock.now += 60.0
        with pytest.raises(NotFound):
            await client.read_blocks(stored.lease, keys(1), [1])
        await client.write_blocks(None, named(*range(2, 18)), [2] * 16)  # takes every slot
        before = rows[1].copy()
        assert (await client.read_blocks(None, keys(1), [1])).blocks == 0
        assert np.array_equal(rows[1], before)


async def test_a_slot_that_was_given_out_again_under_a_copy_is_a_miss(tmp_path: Path) -> None:
    rows = pages(3)
    async with serving_store(tmp_path, slots=16) as store, worker(store, rows) as client:
        stored = await client.write_blocks(None, named(1), [0])
        arena = shared_memory(client)._arena
        (place,) = store.blocks.acquire(stored.lease, keys(1))
        assert arena.read(place, rows[1])
        store.clock.now += 60.0  # the lease is over, and all slots are wanted
        lease = store.blocks.lease(Lease.named(10.0).id, 10.0, opens=True)
        writer = (await client.attached()).writer_id
        assert len(store.blocks.reserve(lease, writer, keys(*range(2, 18))).slots) == 16
        assert not arena.read(place, rows[1])


async def test_bytes_that_changed_under_a_name_are_found_out_by_their_checksum(tmp_path: Path) -> None:
    rows = pages(3)
    async with serving_store(tmp_path, checksums=True) as store, worker(store, rows) as client:
        stored = await client.write_blocks(None, named(1, 2, 3), [0, 1, 2])
        assert (await client.read_blocks(stored.lease, keys(1, 2, 3), [0, 1, 2])).blocks == 3
        blocks, lease = store.blocks, stored.lease
        assert lease is not None
        damaged = blocks.acquire(lease, keys(1, 2))[1].slot
        blocks.arena.write(blocks.layout, damaged, 100, b"a late write")
        assert (await client.read_blocks(lease, keys(1, 2, 3), [0, 1, 2])).blocks == 1


async def test_a_worker_of_another_format_is_refused_when_it_opens_and_later_finds_no_store(tmp_path: Path) -> None:
    other = dataclasses.replace(KV_FORMAT, model="another")
    async with serving_store(tmp_path) as store, worker(store, pages(1)):
        with pytest.raises(FormatMismatch) as refused:
            async with BlockStoreClient.opened(store.address, other, HostPages(pages(1))):
                pass
        assert refused.value.field == "kv_format.model"
        async with KvStoreClient.connect(store.address, lambda: other) as router:
            with pytest.raises(Unavailable, match="another format"):
                await router.lookup(keys(1))


async def test_a_router_that_does_not_know_the_format_yet_is_told_so(tmp_path: Path) -> None:
    known: list[KvFormat] = []
    async with (
        serving_store(tmp_path) as store,
        KvStoreClient.connect(store.address, lambda: known[0] if known else None) as router,
    ):
        with pytest.raises(Unavailable, match="not known yet"):
            await router.lookup(keys(1))
        known.append(KV_FORMAT)
        assert await router.lookup(keys(1)) == 0


@pytest.mark.parametrize("damage", ["removed", "another file", "shorter"])
async def test_where_the_arena_cannot_be_mapped_blocks_go_through_streams(tmp_path: Path, damage: str) -> None:
    async with serving_store(tmp_path) as store:
        arena = tmp_path / store.own_files[0]
        content = arena.read_bytes()
        arena.unlink()
        if damage != "removed":
            arena.write_bytes(bytes(len(content)) if damage == "another file" else content[:-1])
        async with worker(store, pages(2), TransportChoice.AUTO) as client:
            assert len((await client.write_blocks(None, named(1), [0])).refs) == 1
            assert (await client.read_blocks(None, keys(1), [1])).blocks == 1
        async with worker(store, pages(2), TransportChoice.SHARED_MEMORY) as client:
            with pytest.raises(Unavailable):
                await client.write_blocks(None, named(2), [0])
        assert set(store.files()) <= set(store.own_files)


async def test_shared_memory_is_chosen_where_it_works_and_no_lock_stays_behind(tmp_path: Path) -> None:
    async with serving_store(tmp_path) as store:
        async with worker(store, pages(1), TransportChoice.AUTO) as client:
            assert shared_memory(client).name == "shared memory"
            assert len(store.files()) == len(store.own_files) + 1
        assert store.files() == store.own_files
    assert store.files() == []


async def test_who_hears_of_a_later_life_by_its_lease_alone_attaches_to_it(tmp_path: Path) -> None:
    rows, into = pages(1), np.zeros((1, KV_FORMAT.block_bytes), np.uint8)
    async with AsyncExitStack() as life:
        first = await life.enter_async_context(serving_store(tmp_path))
        async with worker(first, into) as reader:
            await life.aclose()
            async with serving_store(tmp_path, listen=first.address) as second, worker(second, rows) as writer:
                stored = await writer.write_blocks(None, named(1), [0])
                with pytest.raises(NotFound):
                    await reader.read_blocks(stored.lease, keys(1), [0])
                async with asyncio.timeout(WAIT_SECONDS):
                    while (loaded := await attempt(reader, stored.lease)) is None:
                        await asyncio.sleep(0.02)
                assert loaded == 1
                assert np.array_equal(into, rows)


async def attempt(reader: BlockStoreClient, lease: Lease) -> int | None:
    """Blocks that were read; None while the connection is not there again."""
    try:
        return (await reader.read_blocks(lease, keys(1), [0])).blocks
    except Unavailable:
        return None
