"""Reading another node's blocks over gRPC: whole blocks, or as many as came whole and why not more."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.peers import Source, sourcing
from tests.support.processes import Service
from tests.support.storecalls import WIDE
from twostroke.errors import DeadlineExceeded, NotFound, Unavailable, WorkerLost
from twostroke.kv.refs import BlockRef, BlockSlot, Lease, Offer
from twostroke.kv.transport.peer import Grant
from twostroke.kv.transport.peer_streams import StreamPeer

GRANT = Grant(Lease(id="l", seconds=10.0, incarnation="i"), "", bytes(32))
BLOCK = BlockSlot(BlockRef(bytes(16), 1, 16), 0)


@asynccontextmanager
async def reading(offer: Offer, *, piece_seconds: float = 5.0) -> AsyncIterator[StreamPeer]:
    transport = StreamPeer(offer, piece_seconds=piece_seconds)
    try:
        yield transport
    finally:
        await transport.close()


@asynccontextmanager
async def pair(folder: Path, **told: object) -> AsyncIterator[tuple[Source, StreamPeer]]:
    async with sourcing(folder, **told) as source, reading(source.streams) as transport:  # type: ignore[arg-type]
        yield source, transport


@pytest.mark.parametrize("wide", [False, True])
async def test_blocks_come_whole_with_their_tokens_and_checksums_in_however_many_pieces(
    tmp_path: Path, wide: bool
) -> None:
    async with pair(tmp_path, **({"kv_format": WIDE} if wide else {})) as (source, transport):
        grant, blocks = source.holding(1, 2, 3, tokens=9)
        into = source.memory(3)
        pulled = await transport.read(grant, blocks, into, None)
        assert pulled.error is None
        assert list(map(bytes, into)) == source.content(3)
        sums = [source.store.blocks.arena.checksum(source.store.blocks.layout, each.slot) for each in blocks]
        assert [(seal.tokens, seal.checksum) for seal in pulled.blocks] == [(9, each) for each in sums]
        assert (await transport.read(grant, [], [], None)).blocks == ()


async def test_a_block_that_the_lease_does_not_keep_ends_the_read_without_an_error(tmp_path: Path) -> None:
    async with pair(tmp_path) as (source, transport):
        grant, blocks = source.holding(1, 2)
        _, foreign = source.holding(3)
        pulled = await transport.read(grant, [*blocks, *foreign], source.memory(3), None)
        assert (len(pulled.blocks), pulled.error) == (2, None)


async def test_a_block_that_is_not_what_its_checksum_says_is_a_miss(tmp_path: Path) -> None:
    async with pair(tmp_path, kv_format=WIDE) as (source, transport):
        grant, blocks = source.holding(1, 2)
        into = [source.memory(1)[0], memoryview(bytearray(source.block_bytes + 1))]
        pulled = await transport.read(grant, blocks, into, None)
        assert (len(pulled.blocks), pulled.error) == (1, None)


async def test_more_bytes_than_there_is_room_for_are_not_taken(tmp_path: Path) -> None:
    async with pair(tmp_path) as (source, transport):
        pulled = await transport.read(*source.holding(1), [memoryview(bytearray(source.block_bytes - 1))], None)
        assert (pulled.blocks, type(pulled.error)) == ((), Unavailable)


async def test_what_the_node_refuses_is_a_typed_error(tmp_path: Path) -> None:
    async with pair(tmp_path) as (source, transport):
        grant, blocks = source.holding(1)
        earlier = dataclasses.replace(grant, lease=dataclasses.replace(grant.lease, incarnation="earlier"))
        assert type((await transport.read(earlier, blocks, source.memory(1), None)).error) is WorkerLost
        late = asyncio.get_running_loop().time() - 1.0
        assert type((await transport.read(grant, blocks, source.memory(1), late)).error) is DeadlineExceeded
        source.store.blocks.release([grant.lease.id])
        assert type((await transport.read(grant, blocks, source.memory(1), None)).error) is NotFound


async def test_a_node_that_is_not_there_is_unavailable() -> None:
    async with reading(Offer("grpc", b"127.0.0.1:1")) as transport:
        pulled = await transport.read(GRANT, [BLOCK], [memoryview(bytearray(64))], None)
        assert (pulled.blocks, type(pulled.error)) == ((), Unavailable)


async def test_a_stuck_node_hits_the_time_limit(tmp_path: Path) -> None:
    service = Service("kvstore", "--arena-bytes", str(1 << 20), "--arena-directory", str(tmp_path))
    try:
        await service.start()
        async with reading(Offer("grpc", service.address.encode()), piece_seconds=0.2) as transport:
            service.freeze()
            pulled = await transport.read(GRANT, [BLOCK], [memoryview(bytearray(64))], None)
            assert (pulled.blocks, type(pulled.error)) == ((), Unavailable)
    finally:
        await service.clear()


async def test_a_cancelled_read_writes_no_more(tmp_path: Path) -> None:
    async with pair(tmp_path, kv_format=WIDE) as (source, transport):
        into = source.memory(3)
        task = asyncio.create_task(transport.read(*source.holding(1, 2, 3), into, None))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for memory in into:
            memory.release()
