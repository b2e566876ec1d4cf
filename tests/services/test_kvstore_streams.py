"""Blocks as streams of pieces: whole ones are stored, broken ones cost nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

from services.kvstore.streams import outgoing
from tests.support.storecalls import (
    BLOCK,
    LEASE,
    SEAL,
    TEN,
    WIDE,
    calling,
    piece,
    refusal,
    stream,
    whole,
    writing,
)
from tests.support.stores import eventually, key, keys, pages
from twostroke.errors import InvalidRequest
from twostroke.kv.messages import PIECE_BYTES
from twostroke.v1 import kvstore_pb2 as pb


@pytest.mark.parametrize(
    ("pieces", "field"),
    [
        pytest.param([piece()], "key", id="no key"),
        pytest.param([piece(BLOCK[:9], key=key(1)), whole(2)], "key", id="a block inside a block"),
        pytest.param([whole(1), piece()], "key", id="after its end"),
        pytest.param([piece(key=b"short")], "key", id="a short key"),
        pytest.param([whole(n) for n in range(5)], "key", id="too many blocks"),
        pytest.param([piece(BLOCK[:9], key=key(1), checksum=SEAL, tokens=16)], "checksum", id="too short"),
        pytest.param([piece(key=key(1)), piece(BLOCK[:1], checksum=SEAL, tokens=16)], "data", id="too long"),
        pytest.param([piece(key=key(1), checksum=SEAL + 1, tokens=16)], "checksum", id="a wrong checksum"),
        pytest.param([piece(key=key(1), checksum=SEAL, tokens=17)], "tokens", id="too many tokens"),
        pytest.param([piece(bytes(PIECE_BYTES + 1), key=key(1))], "data", id="too large a piece"),
    ],
)
async def test_a_malformed_stream_is_refused_and_leaves_no_slot_and_no_lease(
    tmp_path: Path, pieces: list[pb.WriteRequest], field: str
) -> None:
    async with calling(tmp_path, max_keys=4) as caller:
        await caller.attach()
        assert (await refusal(InvalidRequest, caller.write(*pieces))).field == field
        stats = caller.store.stats
        assert (stats.reserved, stats.quarantined, stats.leases) == (0, 0, 0)


async def test_a_stream_that_ends_inside_a_block_is_refused_but_the_whole_blocks_before_it_stay(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        await caller.attach()
        broken = caller.write(whole(1, tokens=5), piece(BLOCK[:9], key=key(2)))
        assert (await refusal(InvalidRequest, broken)).field == "data"
        stats = caller.store.stats
        assert (stats.committed, stats.reserved, stats.leases) == (1, 0, 0)


async def test_a_writer_that_leaves_inside_a_block_gives_its_slot_and_lease_back(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        await caller.attach()
        call = caller.stub.Write(timeout=5)
        await call.write(
            pb.WriteRequest(incarnation=caller.incarnation, lease_id=LEASE, opens=True, lease_duration=TEN)
        )
        await call.write(piece(BLOCK[:9], key=key(1)))
        await eventually(lambda: caller.store.stats.reserved == 1)
        call.cancel()
        await eventually(lambda: caller.store.stats.free == 16)
        await eventually(lambda: caller.store.stats.leases == 0)


async def test_a_stream_that_finds_no_room_is_read_to_its_end_and_dropped(tmp_path: Path) -> None:
    async with writing(tmp_path, slots=64) as caller:
        await caller.reserve(*range(100, 100 + caller.store.stats.slots))
        written = await caller.write(whole(1), whole(2))
        assert list(written.committed) == []


async def test_a_large_block_is_streamed_in_pieces_of_at_most_one_mebibyte(tmp_path: Path) -> None:
    async with calling(tmp_path, kv_format=WIDE, slots=2) as caller:
        await caller.attach(WIDE)
        row = pages(1, WIDE)[0].tobytes()
        cuts = [row[at : at + PIECE_BYTES] for at in range(0, len(row), PIECE_BYTES)]
        sent = [pb.WriteRequest(data=cut) for cut in cuts]
        sent[0].key, sent[-1].checksum, sent[-1].tokens = key(1), xxhash.xxh3_64_intdigest(row), 16
        await caller.write(*sent)
        request = pb.ReadRequest(incarnation=caller.incarnation, lease_id=LEASE, keys=keys(1))
        got = [each async for each in caller.stub.Read(request, timeout=5)]
        assert b"".join(each.data for each in got) == row
        assert max(len(each.data) for each in got) == PIECE_BYTES
        assert [each.HasField("checksum") for each in got] == [False] * (len(got) - 1) + [True]


async def test_a_stream_ends_with_the_lease_even_inside_a_block(tmp_path: Path) -> None:
    async with calling(tmp_path, kv_format=WIDE, slots=2) as caller:
        await caller.attach(WIDE)
        row = pages(1, WIDE)[0].tobytes()
        first, last = pb.WriteRequest(key=key(1), data=row[:PIECE_BYTES]), pb.WriteRequest(data=row[PIECE_BYTES:])
        last.checksum, last.tokens = xxhash.xxh3_64_intdigest(row), 16
        await caller.write(first, last)
        pieces = outgoing(caller.store.blocks, LEASE, keys(1))
        assert next(pieces).last is None
        caller.store.clock.now += 10.0
        assert list(pieces) == []


async def test_a_stream_without_a_deadline_is_refused(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        await caller.attach()
        named = {"incarnation": caller.incarnation}
        read = caller.stub.Read(pb.ReadRequest(lease_id="a", **named)).read()
        write = caller.stub.Write(stream(pb.WriteRequest(lease_duration=TEN, **named)))
        for call in (read, write):
            assert (await refusal(InvalidRequest, call)).field == "deadline"
