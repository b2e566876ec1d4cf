"""The data plane, spoken to by hand: who is served, who is refused, and what is left behind."""

from __future__ import annotations

import asyncio
import dataclasses
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.kvstore.dataplane import serving_data
from services.kvstore.sending import Sender
from services.kvstore.settings import DataSettings
from tests.support.peers import LARGE, Source, asked, held, sourcing
from tests.support.stores import WAIT_SECONDS, eventually
from twostroke.errors import Unavailable
from twostroke.kv.refs import Offer
from twostroke.kv.transport import frames
from twostroke.kv.transport.frames import Code, Status, Trailer
from twostroke.settings import InvalidSetting


@asynccontextmanager
async def connected(source: Source) -> AsyncIterator[tuple[StreamReader, StreamWriter]]:
    host, _, port = source.plane.offer.address.decode().rpartition(":")
    async with asyncio.timeout(WAIT_SECONDS):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


async def status(reader: StreamReader) -> Status:
    return Status.unpack(await reader.readexactly(frames.STATUS_BYTES))


async def trailer(reader: StreamReader) -> Trailer:
    return Trailer.unpack(await reader.readexactly(frames.TRAILER_BYTES))


async def refused(source: Source, request: bytes) -> Code:
    """How a request ends that is refused; nothing but the refusal may come."""
    async with connected(source) as (reader, writer):
        assert (await status(reader)).code is Code.OK
        writer.write(request)
        said = await reader.read()
        assert len(said) == frames.STATUS_BYTES
    return Status.unpack(said).code


@pytest.mark.parametrize("checksums", [False, True])
async def test_a_request_is_answered_with_each_block_and_its_seal(tmp_path: Path, checksums: bool) -> None:
    async with sourcing(tmp_path, checksums=checksums) as source, connected(source) as (reader, writer):
        grant, blocks = source.holding(1, 2, tokens=7)
        assert await status(reader) == Status(Code.OK)
        for _ in range(2):
            writer.write(asked(grant, blocks))
            assert await status(reader) == Status(Code.OK, source.block_bytes)
            for index, content in enumerate(source.content(2)):
                assert await reader.readexactly(source.block_bytes) == content
                seal = await trailer(reader)
                checksum = source.store.blocks.arena.checksum(source.store.blocks.layout, blocks[index].slot)
                assert seal == Trailer(whole=True, follows=index == 0, tokens=7, checksum=checksum)


async def test_blocks_come_as_far_as_the_lease_keeps_them(tmp_path: Path) -> None:
    async with sourcing(tmp_path) as source, connected(source) as (reader, writer):
        grant, blocks = source.holding(1, 2)
        _, foreign = source.holding(3)
        await status(reader)
        writer.write(asked(grant, [*blocks, *foreign]))
        await status(reader)
        for follows in (True, False):
            await reader.readexactly(source.block_bytes)
            assert (await trailer(reader)).follows is follows


async def test_a_slot_that_is_used_again_under_the_send_is_said_to_be_lost(tmp_path: Path) -> None:
    async with sourcing(tmp_path, kv_format=LARGE, slots=2) as source, connected(source) as (reader, writer):
        grant, blocks = source.holding(1, 2)
        await status(reader)
        writer.write(asked(grant, blocks))
        await status(reader)
        await reader.readexactly(1)  # the send has begun; it cannot end before more is read
        source.reuse(grant, 3)
        await reader.readexactly(source.block_bytes - 1)
        assert await trailer(reader) == Trailer(whole=False, follows=False, tokens=0, checksum=0)
        writer.write(asked(grant, blocks))  # the connection is still in step
        assert (await status(reader)).code is Code.NOT_LEASED


async def test_a_request_without_the_proof_of_its_lease_is_refused_and_gets_nothing(tmp_path: Path) -> None:
    async with sourcing(tmp_path) as source:
        grant, blocks = source.holding(1)
        other, _ = source.holding(2)
        forged = [
            dataclasses.replace(grant, proof=bytes(32)),
            dataclasses.replace(grant, proof=other.proof),
            dataclasses.replace(grant, namespace="another"),
            dataclasses.replace(other, lease=grant.lease),
        ]
        for each in forged:
            assert await refused(source, asked(each, blocks)) is Code.UNPROVEN
        await eventually(lambda: source.plane.refused == {Code.UNPROVEN: len(forged)})


async def test_a_proof_does_not_open_another_life_of_the_node_nor_blocks_after_the_lease(tmp_path: Path) -> None:
    async with sourcing(tmp_path) as source:
        grant, blocks = source.holding(1)
        _, foreign = source.holding(2)
        earlier = dataclasses.replace(grant, lease=dataclasses.replace(grant.lease, incarnation="earlier"))
        assert await refused(source, asked(earlier, blocks)) is Code.OTHER_LIFE
        assert await refused(source, asked(grant, foreign)) is Code.NOT_LEASED
        moved = [dataclasses.replace(blocks[0], slot=1 << 31)]
        assert await refused(source, asked(grant, moved)) is Code.NOT_LEASED
        source.store.blocks.release([grant.lease.id])
        assert await refused(source, asked(grant, blocks)) is Code.NOT_LEASED
        await eventually(lambda: source.plane.refused == {Code.OTHER_LIFE: 1, Code.NOT_LEASED: 3})


@pytest.mark.parametrize(
    "spoiled",
    [
        pytest.param(lambda request: b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + bytes(99), id="another protocol"),
        pytest.param(lambda request: request[:8] + b"\xff\xff" + request[10:], id="another version"),
        pytest.param(lambda request: request[:10] + b"\xff\xff" + request[12:], id="a long name"),
        pytest.param(lambda request: request[:16] + b"\xff\xff\xff\xff" + request[20:], id="too many blocks"),
        pytest.param(lambda request: request[:16] + bytes(4) + request[20:], id="no blocks"),
        pytest.param(lambda request: request + b"x", id="more than a request"),
    ],
)
async def test_what_is_no_request_is_refused_and_ends_the_connection(tmp_path: Path, spoiled: object) -> None:
    async with sourcing(tmp_path) as source:
        request = asked(*source.holding(1))
        assert await refused(source, spoiled(request)) is Code.MALFORMED  # type: ignore[operator]


async def test_one_connection_too_many_is_told_so_and_closed_and_a_place_that_is_left_is_taken(tmp_path: Path) -> None:
    async with sourcing(tmp_path, connections=2) as source:
        async with connected(source) as first, connected(source) as second:
            for reader, _ in (first, second):
                assert (await status(reader)).code is Code.OK
            async with connected(source) as (reader, _):
                assert (await status(reader)).code is Code.BUSY
                assert await reader.read() == b""
            assert source.plane.refused == {Code.BUSY: 1}
        await eventually(lambda: source.plane.connections == 0)
        async with connected(source) as (reader, _):
            assert (await status(reader)).code is Code.OK


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0"])
async def test_an_address_is_told_as_it_is_or_as_the_operator_says(tmp_path: Path, listen: str) -> None:
    async with sourcing(tmp_path, listen=listen) as source:
        async with connected(source) as (reader, _):
            assert (await status(reader)).code is Code.OK
        taken = DataSettings(data_listen=source.plane.offer.address.decode())
        with pytest.raises(Unavailable, match="cannot listen"):
            async with serving_data(taken, Sender(source.store.node.blocks, source.key, 1.0, 1.0)):
                pass
    async with sourcing(tmp_path, listen=listen, advertise="node-1:7000") as source:
        assert source.plane.offer == Offer("tcp", b"node-1:7000")


@pytest.mark.parametrize(
    "told",
    [{"listen": "7000"}, {"advertise": "node"}, {"connections": 0}, {"idle_seconds": 0.0}, {"send_seconds": -1.0}],
)
def test_settings_that_cannot_be_kept_are_refused_by_name(told: dict[str, object]) -> None:
    (name,) = told
    with pytest.raises(InvalidSetting, match=f"--data-{name}".replace("_", "-")):
        DataSettings(**{f"data_{name}": told[name]})  # type: ignore[arg-type]


async def test_a_silent_connection_is_closed(tmp_path: Path) -> None:
    async with sourcing(tmp_path, idle_seconds=0.05) as source, connected(source) as (reader, writer):
        await status(reader)
        writer.write(b"2stroke")  # the beginning of a request
        assert await reader.read() == b""


async def test_a_peer_that_does_not_read_is_left_and_its_block_let_go(tmp_path: Path) -> None:
    async with (
        sourcing(tmp_path, kv_format=LARGE, slots=2, send_seconds=0.05) as source,
        connected(source) as (reader, writer),
    ):
        await status(reader)
        writer.write(asked(*source.holding(1)))
        assert source.plane.connections == 1
        await eventually(lambda: source.plane.connections == 0)


async def test_closing_ends_a_send_that_nobody_reads(tmp_path: Path) -> None:
    async with (
        sourcing(tmp_path, kv_format=LARGE, slots=2, send_seconds=60.0) as source,
        connected(source) as (reader, writer),
    ):
        writer.write(asked(*source.holding(1)))
        await reader.readexactly(2 * frames.STATUS_BYTES + 1)
        await source.plane.close()
        assert source.plane.connections == 0


async def test_a_thousand_connections_leave_no_descriptor_and_no_thread(tmp_path: Path) -> None:
    before = held()
    async with sourcing(tmp_path, connections=8) as source:
        grant, blocks = source.holding(1)
        serving = held()

        async def come_and_go(count: int) -> None:
            for each in range(count):
                await eventually(lambda: source.plane.connections < 4)  # what has left is closed a moment later
                async with connected(source) as (reader, writer):
                    await status(reader)
                    writer.write(asked(grant, blocks)[: None if each % 2 else 40])
                    if each % 2:
                        await reader.readexactly(frames.STATUS_BYTES + source.block_bytes)

        await asyncio.gather(*(come_and_go(250) for _ in range(4)))
        await eventually(lambda: source.plane.connections == 0)
        descriptors, threads = held()
        assert descriptors <= serving[0]
        assert threads <= serving[1] + 8
        assert source.plane.refused == {}
    assert held() <= before
