"""FaultService at a node's disk: what fails there costs a block or the tier, never a wrong byte and never an error."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from services.kvstore.assembly import assembled
from services.kvstore.settings import DiskSettings, KvStoreSettings, StoreSettings
from services.kvstore.spool import SpoolStats
from tests.support.faults import armed
from tests.support.stores import Clock, Store, eventually, keys, named, pages, worker
from twostroke.kv.blocks import TransportChoice
from twostroke.rpc.channel import connect
from twostroke.rpc.server import ServerSettings
from twostroke.v1.faults_pb2 import (
    FAULT_CORRUPT,
    FAULT_DELAY,
    FAULT_FAIL,
    FAULT_FULL,
    FAULT_HOLD,
    MOMENT_ANSWERED,
    MOMENT_CALLED,
    Fault,
    Moment,
)

BLOCKS = 40  # more than the arena has room for
RETRY_SECONDS = 0.05


@asynccontextmanager
async def node(folder: Path) -> AsyncIterator[Store]:
    """A node with a disk, as in production, where faults can be armed."""
    settings = KvStoreSettings(
        server=ServerSettings(fault_points=True, drain_seconds=1.0),
        store=StoreSettings(arena_bytes=1 << 16, arena_directory=folder),
        disk=DiskSettings(
            disk_directory=folder / "disk", disk_bytes=4 << 20, disk_retry_seconds=RETRY_SECONDS, disk_read_seconds=0.1
        ),
    )
    async with assembled(settings) as (server, started):
        yield Store(server.address, started, folder, Clock())


@asynccontextmanager
async def struck(
    store: Store, operation: str, moment: Moment.ValueType, fault: Fault.ValueType, *, skip: int = 0
) -> AsyncIterator[None]:
    """One fault, which has struck when the block ends."""
    channel = connect(store.address)
    async with armed(channel, operation, moment, fault, skip=skip, delay=0.3) as waiting:
        yield
        assert await waiting.struck() == 1
    await channel.close()


def spooled(store: Store) -> SpoolStats:
    stats = store.node.disk_stats()
    assert stats is not None
    return stats[0]


async def write(store: Store, rows: np.ndarray, *names: int) -> None:
    """Store blocks; each is in the arena then, whatever the disk does."""
    async with worker(store, rows) as client:
        for name in names:
            stored = await client.write_blocks(None, named(name), [name])
            assert [ref.key for ref in stored.refs] == keys(name)
            assert stored.lease is not None
            client.release(stored.lease)
            await client.released()
            await eventually(lambda: not spooled(store).waiting)


async def read(store: Store, rows: np.ndarray, count: int) -> int:
    """How many leading blocks come back; each must be the right one."""
    into = np.zeros_like(rows)
    async with worker(store, into, TransportChoice.GRPC) as client:
        loaded = await client.read_blocks(None, keys(*range(count)), list(range(count)))
        if loaded.lease is not None:
            client.release(loaded.lease)
    assert np.array_equal(into[: loaded.blocks], rows[: loaded.blocks])
    return loaded.blocks


async def returns(store: Store, rows: np.ndarray, name: int) -> None:
    """The tier comes back by itself, with a later write."""
    async with worker(store, rows) as client:

        async def on() -> bool:
            stored = await client.write_blocks(None, named(name), [name % len(rows)])
            if stored.lease is not None:
                client.release(stored.lease)
            return spooled(store).tier.on

        while not await on():
            name += 1


@pytest.mark.parametrize("moment", [MOMENT_CALLED, MOMENT_ANSWERED], ids=["before", "after"])
@pytest.mark.parametrize("fault", [FAULT_FAIL, FAULT_FULL], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("operation", ["disk.blocks.write", "disk.headers.write"])
async def test_a_write_that_fails_turns_the_disk_off_for_a_while(
    tmp_path: Path, operation: str, fault: Fault.ValueType, moment: Moment.ValueType, caplog: pytest.LogCaptureFixture
) -> None:
    rows = pages(BLOCKS, seed=1)
    async with node(tmp_path) as store:
        await write(store, rows, 0)
        async with struck(store, operation, moment, fault):
            await write(store, rows, 1)
        await eventually(lambda: spooled(store).tier.failures == 1)
        assert await read(store, rows, 2) == 2
        await returns(store, rows, 100)
        assert spooled(store).tier.failures == 1
        said = [record for record in caplog.records if record.message.startswith("the disk tier is off")]
        assert len(said) == 1
        assert "on purpose" in said[0].error  # type: ignore[attr-defined]
        assert store.idle


async def test_a_disk_that_cannot_be_opened_is_tried_again(tmp_path: Path) -> None:
    rows = pages(BLOCKS, seed=2)
    async with node(tmp_path) as store:
        async with struck(store, "disk.headers.open", MOMENT_CALLED, FAULT_FULL), worker(store, rows) as client:
            await client.attached()
            await eventually(lambda: spooled(store).tier.failures == 1)
        assert not spooled(store).tier.on
        await returns(store, rows, 0)


@pytest.mark.parametrize("fault", [FAULT_FAIL, FAULT_CORRUPT], ids=["EIO", "one bit"])
async def test_blocks_are_read_up_to_the_one_that_the_disk_lost(tmp_path: Path, fault: Fault.ValueType) -> None:
    rows = pages(BLOCKS, seed=3)
    async with node(tmp_path) as store:
        await write(store, rows, *range(BLOCKS))
        async with struck(store, "disk.blocks.read", MOMENT_ANSWERED, fault, skip=2):
            assert await read(store, rows, 5) == 2
        tier = spooled(store).tier
        assert (tier.on, tier.failures, tier.damaged) == ((False, 1, 0) if fault == FAULT_FAIL else (True, 0, 1))
        assert store.idle


async def test_a_block_that_was_corrupted_on_its_way_to_the_disk_is_found_out_when_it_is_read(tmp_path: Path) -> None:
    rows = pages(BLOCKS, seed=4)
    async with node(tmp_path) as store:
        async with struck(store, "disk.blocks.write", MOMENT_CALLED, FAULT_CORRUPT, skip=1):
            await write(store, rows, 0, 1)
        assert await read(store, rows, 2) == 2  # the arena's own are whole
    async with node(tmp_path) as store:
        async with worker(store, rows) as client:
            await client.attached()
        await eventually(lambda: spooled(store).tier.blocks == 2)
        assert await read(store, rows, 2) == 1
        assert spooled(store).tier.damaged == 1


@pytest.mark.parametrize("fault", [FAULT_HOLD, FAULT_DELAY], ids=["hung", "slow"])
async def test_a_disk_that_is_slow_is_not_waited_for(tmp_path: Path, fault: Fault.ValueType) -> None:
    rows = pages(BLOCKS, seed=5)
    async with node(tmp_path) as store:
        await write(store, rows, *range(BLOCKS))
        async with struck(store, "disk.blocks.read", MOMENT_CALLED, fault):
            assert await read(store, rows, 3) == 0
        await eventually(lambda: store.idle)  # the slots that were read into come back with the read
        assert await read(store, rows, 3) == 3
        assert spooled(store).tier.on
