"""A node with a disk: blocks that left the arena, or were there before a restart, are read as if they never had."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest

from services.kvstore.settings import DiskSettings
from services.kvstore.spool import SpoolStats
from tests.support.stores import Store, eventually, keys, named, pages, serving_store, worker
from twostroke.kv.advice import StoreAdvice
from twostroke.kv.blocks import TransportChoice
from twostroke.kv.refs import Terms

BLOCKS, SLOTS = 40, 16
both = pytest.mark.parametrize("transport", [TransportChoice.SHARED_MEMORY, TransportChoice.GRPC])


def disk(folder: Path, **told: object) -> DiskSettings:
    return DiskSettings(disk_directory=folder / "disk", disk_bytes=4 << 20, **told)  # type: ignore[arg-type]


def spooled(store: Store) -> SpoolStats:
    stats = store.node.disk_stats()
    assert stats is not None
    return stats[0]


async def written(store: Store, rows: np.ndarray, transport: TransportChoice) -> None:
    """Store BLOCKS blocks, a few at a time, and return once all are on disk."""
    async with worker(store, rows, transport) as client:
        for block in range(BLOCKS):
            stored = await client.write_blocks(None, named(block), [block])
            client.release(stored.lease)
            await client.released()
            await eventually(lambda block=block: spooled(store).written == block + 1)


async def read(store: Store, count: int, transport: TransportChoice) -> tuple[int, np.ndarray]:
    rows = np.zeros_like(pages(BLOCKS))
    async with worker(store, rows, transport) as client:
        held = await client.lookup(keys(*range(BLOCKS)))
        loaded = await client.read_blocks(None, keys(*range(count)), list(range(count)))
        client.release(loaded.lease)
    return min(held, loaded.blocks), rows


@both
async def test_blocks_that_left_the_arena_come_back_from_disk(tmp_path: Path, transport: TransportChoice) -> None:
    rows = pages(BLOCKS, seed=1)
    async with serving_store(tmp_path, slots=SLOTS, disk=disk(tmp_path)) as store:
        await written(store, rows, transport)
        for _ in range(2):
            count, found = await read(store, 10, transport)
            assert count == 10
            assert np.array_equal(found[:10], rows[:10])
        assert store.idle


async def test_blocks_can_be_brought_into_the_arena_ahead_of_their_use(tmp_path: Path) -> None:
    rows = pages(BLOCKS, seed=1)
    async with serving_store(tmp_path, slots=SLOTS, disk=disk(tmp_path)) as store:
        await written(store, rows, TransportChoice.SHARED_MEMORY)
        async with worker(store, rows) as client:
            assert store.blocks.lookup(keys(*range(10))) == 0
            assert await StoreAdvice(client).promote("default", keys(*range(10))) == 10
            assert store.blocks.lookup(keys(*range(10))) == 10
        assert store.idle


@both
async def test_blocks_are_there_after_a_restart(tmp_path: Path, transport: TransportChoice) -> None:
    rows = pages(BLOCKS, seed=2)
    async with serving_store(tmp_path, slots=BLOCKS, disk=disk(tmp_path)) as store:
        await written(store, rows, transport)
    async with serving_store(tmp_path, slots=BLOCKS, disk=disk(tmp_path)) as store:
        async with worker(store, rows, transport) as client:
            await client.attached()
        await eventually(lambda: spooled(store).tier.on)
        count, found = await read(store, BLOCKS, transport)
        assert count == BLOCKS
        assert np.array_equal(found, rows)
        assert store.idle


async def test_a_block_is_brought_back_once_for_all_who_ask(tmp_path: Path) -> None:
    rows = pages(BLOCKS, seed=3)
    async with serving_store(tmp_path, slots=SLOTS, disk=disk(tmp_path)) as store:
        await written(store, rows, TransportChoice.SHARED_MEMORY)
        found = await asyncio.gather(*(read(store, 3, TransportChoice.SHARED_MEMORY) for _ in range(6)))
        assert all(count == 3 and np.array_equal(read_[:3], rows[:3]) for count, read_ in found)
        assert store.node.promotion is not None
        assert store.node.promotion.promoted == 3
        assert store.idle


async def test_what_comes_back_takes_of_the_share_of_who_asked(tmp_path: Path) -> None:
    rows = pages(BLOCKS, seed=4)
    async with serving_store(tmp_path, slots=SLOTS, disk=disk(tmp_path), namespace_share=0.5) as store:
        await written(store, rows, TransportChoice.SHARED_MEMORY)
        async with worker(store, np.zeros_like(rows)) as client:
            loaded = await client.read_blocks(None, keys(*range(12)), list(range(12)), Terms(namespace="small"))
            assert loaded.blocks == SLOTS // 2
            client.release(loaded.lease)


async def test_transient_blocks_never_come_to_disk(tmp_path: Path) -> None:
    async with serving_store(tmp_path, disk=disk(tmp_path)) as store, worker(store, pages(2)) as client:
        hidden = await client.write_blocks(None, named(1), [0], Terms(transient=True))
        shown = await client.write_blocks(None, named(2), [1])
        await eventually(lambda: spooled(store).written == 1)
        assert spooled(store).tier.blocks == 1
        for lease in (hidden.lease, shown.lease):
            assert lease is not None
            client.release(lease)


async def test_a_disk_that_is_gone_is_a_miss_and_the_arena_goes_on(tmp_path: Path) -> None:
    rows = pages(BLOCKS, seed=5)
    async with serving_store(tmp_path, slots=SLOTS, disk=disk(tmp_path)) as store:
        await written(store, rows, TransportChoice.SHARED_MEMORY)
        for file in (tmp_path / "disk").rglob("*"):
            if file.is_file():
                file.write_bytes(b"")
        shutil.rmtree(tmp_path / "disk")
        count, _ = await read(store, 4, TransportChoice.SHARED_MEMORY)
        assert count == 0
        async with worker(store, rows) as client:
            stored = await client.write_blocks(None, named(1, 2), [1, 2])
            assert len(stored.refs) == 2
            client.release(stored.lease)
        assert store.idle
