"""A worker's read that breaks off: what came whole is of use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt
import pytest

from services.kvstore.service import KvStoreService
from tests.support.faults import armed
from tests.support.stores import KV_FORMAT, keys, named, pages, serving_store
from twostroke.errors import Unavailable
from twostroke.kv.blocks import BlockStoreClient, TransportChoice
from twostroke.kv.transport.pages import HostPages
from twostroke.rpc.channel import connect
from twostroke.rpc.server import ServerSettings, serving
from twostroke.v1 import faults_pb2

COUNT = 12  # blocks: more than are copied at once
READ = ("KvStoreService/Read", faults_pb2.MOMENT_ANSWERED, faults_pb2.FAULT_FAIL)


@asynccontextmanager
async def streaming(
    folder: Path, rows: npt.NDArray[np.uint8]
) -> AsyncIterator[tuple[BlockStoreClient, grpc.aio.Channel]]:
    """A client that reads and writes by streams, and the channel on which its store takes faults."""
    async with (
        serving_store(folder) as store,
        serving(ServerSettings(fault_points=True, drain_seconds=1.0), KvStoreService(store.node)) as server,
        BlockStoreClient.opened(server.address, KV_FORMAT, HostPages(rows), transport=TransportChoice.GRPC) as client,
        connect(server.address) as channel,
    ):
        yield client, channel


@pytest.mark.parametrize("whole", [1, 8, 11])
async def test_blocks_that_came_before_a_stream_broke_are_read(tmp_path: Path, whole: int) -> None:
    rows = np.concatenate([pages(COUNT), np.zeros((COUNT, KV_FORMAT.block_bytes), dtype=np.uint8)])
    async with streaming(tmp_path, rows) as (client, channel):
        stored = await client.write_blocks(None, named(*range(COUNT)), range(COUNT))
        async with armed(channel, *READ, skip=whole):
            loaded = await client.read_blocks(stored.lease, keys(*range(COUNT)), range(COUNT, 2 * COUNT))
    assert loaded.blocks == whole
    np.testing.assert_array_equal(rows[COUNT : COUNT + whole], rows[:whole])
    assert not rows[COUNT + whole :].any()


async def test_a_stream_that_breaks_before_its_first_block_is_an_error(tmp_path: Path) -> None:
    async with streaming(tmp_path, pages(2 * COUNT)) as (client, channel):
        stored = await client.write_blocks(None, named(*range(COUNT)), range(COUNT))
        async with armed(channel, *READ):
            with pytest.raises(Unavailable):
                await client.read_blocks(stored.lease, keys(*range(COUNT)), range(COUNT, 2 * COUNT))
