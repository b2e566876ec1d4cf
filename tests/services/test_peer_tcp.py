"""Reading from a data plane: whole blocks, or as many as came whole and why not more; no hang, no wrong byte."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.peers import LARGE, block_ends, reading, relayed, sourcing
from tests.support.stores import WAIT_SECONDS, eventually
from twostroke.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    TwostrokeError,
    Unavailable,
    WorkerLost,
)
from twostroke.kv.refs import BlockRef, BlockSlot, Lease, Offer
from twostroke.kv.transport import frames
from twostroke.kv.transport.peer import Grant
from twostroke.kv.transport.tcp import TcpTransport


@pytest.mark.parametrize("checksums", [False, True])
async def test_blocks_go_from_slot_to_slot_with_their_tokens_and_checksums(tmp_path: Path, checksums: bool) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    async with (
        sourcing(folders[0], checksums=checksums) as source,
        sourcing(folders[1]) as target,
        reading(source.plane.offer) as transport,
    ):
        grant, blocks = source.holding(1, 2, 3, tokens=9)
        arena, layout = target.store.blocks.arena, target.store.blocks.layout
        with ExitStack() as stack:
            into = [stack.enter_context(arena.block(layout, slot)) for slot in (4, 2, 7)]
            pulled = await transport.read(grant, blocks, into, None)
        assert pulled.error is None
        for slot, content, seal in zip((4, 2, 7), source.content(3), pulled.blocks, strict=True):
            assert arena.read(layout, slot, 0, layout.block_bytes) == content
            assert (seal.tokens, seal.checksum) == (9, arena.checksum(layout, slot))


async def test_reads_share_a_bounded_number_of_connections_and_keep_them(tmp_path: Path) -> None:
    async with sourcing(tmp_path) as source, reading(source.plane.offer, connections=2) as transport:
        grant, blocks = source.holding(1, 2, 3)
        for _ in range(3):
            rooms = [source.memory(3) for _ in range(9)]
            for pulled in await asyncio.gather(*(transport.read(grant, blocks, into, None) for into in rooms)):
                assert (len(pulled.blocks), pulled.error) == (3, None)
            assert [list(map(bytes, into)) for into in rooms] == [source.content(3)] * 9
            assert source.plane.connections == 2


async def test_reads_beyond_those_that_may_wait_are_turned_away(tmp_path: Path) -> None:
    async with sourcing(tmp_path) as source, reading(source.plane.offer, connections=1, waiting=1) as transport:
        grant, blocks = source.holding(1)
        pulled = await asyncio.gather(*(transport.read(grant, blocks, source.memory(1), None) for _ in range(3)))
        assert sorted(type(each.error) for each in pulled if each.error) == [Overloaded]


async def test_a_connection_that_the_source_has_closed_meanwhile_is_replaced(tmp_path: Path) -> None:
    async with sourcing(tmp_path, idle_seconds=0.02) as source, reading(source.plane.offer) as transport:
        grant, blocks = source.holding(1)
        for _ in range(3):
            into = source.memory(1)
            assert (await transport.read(grant, blocks, into, None)).error is None
            assert list(map(bytes, into)) == source.content(1)
            await eventually(lambda: source.plane.connections == 0)


async def test_a_block_that_the_lease_does_not_keep_ends_the_read_without_an_error(tmp_path: Path) -> None:
    async with sourcing(tmp_path) as source, reading(source.plane.offer) as transport:
        grant, blocks = source.holding(1, 2)
        _, foreign = source.holding(3)
        pulled = await transport.read(grant, [*blocks, *foreign], source.memory(3), None)
        assert (len(pulled.blocks), pulled.error) == (2, None)
        assert await transport.read(grant, [], [], None) == dataclasses.replace(pulled, blocks=())
        assert source.plane.connections == 1


async def test_a_slot_that_is_used_again_under_the_read_is_a_miss(tmp_path: Path) -> None:
    async with sourcing(tmp_path, kv_format=LARGE, slots=3) as source:
        hold = block_ends(source.block_bytes, 0) + 1_000
        with relayed(source.plane.offer, hold_at=hold) as relay:
            async with reading(relay.offer) as transport:
                grant, blocks = source.holding(1, 2, 3)
                task = asyncio.create_task(transport.read(grant, blocks, source.memory(3), None))
                assert await asyncio.to_thread(relay.held.wait, WAIT_SECONDS)
                source.reuse(grant, 4)
                relay.go.set()
                pulled = await task
                assert (len(pulled.blocks), pulled.error) == (1, None)


@pytest.mark.parametrize("index", [0, 1, 2])
async def test_a_block_that_changes_on_its_way_is_a_miss(tmp_path: Path, index: int) -> None:
    async with sourcing(tmp_path) as source:
        byte = block_ends(source.block_bytes, index) - frames.TRAILER_BYTES - 9
        with relayed(source.plane.offer, flip_at=byte) as relay:
            async with reading(relay.offer) as transport:
                pulled = await transport.read(*source.holding(1, 2, 3), source.memory(3), None)
                assert (len(pulled.blocks), pulled.error) == (index, None)


async def test_a_deadline_ends_a_read_inside_a_block_and_keeps_those_before_it(tmp_path: Path) -> None:
    async with sourcing(tmp_path, kv_format=LARGE, slots=3) as source:
        with relayed(source.plane.offer, hold_at=block_ends(source.block_bytes, 0) + 1_000) as relay:
            async with reading(relay.offer) as transport:
                deadline = asyncio.get_running_loop().time() + 0.5
                task = asyncio.create_task(transport.read(*source.holding(1, 2), source.memory(2), deadline))
                assert await asyncio.to_thread(relay.held.wait, WAIT_SECONDS)
                pulled = await task
                assert (len(pulled.blocks), type(pulled.error)) == (1, DeadlineExceeded)


async def test_a_cancelled_read_gives_its_memory_back_at_once(tmp_path: Path) -> None:
    async with sourcing(tmp_path, kv_format=LARGE, slots=3) as source:
        with relayed(source.plane.offer, hold_at=block_ends(source.block_bytes, 0) + 1_000) as relay:
            async with reading(relay.offer, block_seconds=60.0) as transport:
                into = source.memory(2)
                task = asyncio.create_task(transport.read(*source.holding(1, 2), into, None))
                assert await asyncio.to_thread(relay.held.wait, WAIT_SECONDS)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                for memory in into:
                    memory.release()  # BufferError while anybody writes there
                await eventually(lambda: source.plane.connections == 0)


async def test_a_refusal_is_a_typed_error(tmp_path: Path) -> None:
    async with sourcing(tmp_path, connections=1) as source, reading(source.plane.offer) as transport:
        grant, blocks = source.holding(1)
        ended = dataclasses.replace(grant, proof=bytes(32))
        assert await error_of(transport, ended, blocks) == (InvalidRequest, "proof")
        earlier = dataclasses.replace(grant, lease=dataclasses.replace(grant.lease, incarnation="earlier"))
        assert await error_of(transport, earlier, blocks) == (WorkerLost, "incarnation")
        async with reading(source.plane.offer) as first:
            assert (await first.read(grant, blocks, source.memory(1), None)).error is None
            assert await error_of(transport, grant, blocks) == (Overloaded, None)
        source.store.blocks.release([grant.lease.id])
        await eventually(lambda: source.plane.connections == 0)
        assert await error_of(transport, grant, blocks) == (NotFound, "lease_id")


GRANT = Grant(Lease(id="l", seconds=10.0, incarnation="i"), "", bytes(32))
BLOCK = BlockSlot(BlockRef(bytes(16), 1, 16), 0)


async def error_of(
    transport: TcpTransport, grant: Grant, blocks: list[BlockSlot]
) -> tuple[type[TwostrokeError], object]:
    pulled = await transport.read(grant, blocks, [memoryview(bytearray(4_096)) for _ in blocks], None)
    assert pulled.blocks == ()
    assert pulled.error is not None
    return type(pulled.error), pulled.error.field


@pytest.mark.parametrize("address", [b"127.0.0.1:1", b"", b"nonsense", b"\xff\xff:x", b"[::1]:1", b"127.0.0.1:99999"])
async def test_a_data_plane_that_is_not_there_is_unavailable(address: bytes) -> None:
    async with reading(Offer("tcp", address)) as transport:
        assert await error_of(transport, GRANT, [BLOCK]) == (Unavailable, None)


async def test_memory_of_another_size_than_the_peer_s_blocks_is_not_filled(tmp_path: Path) -> None:
    async with sourcing(tmp_path) as source, reading(source.plane.offer) as transport:
        pulled = await transport.read(*source.holding(1), [memoryview(bytearray(source.block_bytes - 1))], None)
        assert (pulled.blocks, type(pulled.error)) == ((), Unavailable)
