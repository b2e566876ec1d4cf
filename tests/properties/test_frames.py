"""Frames of the data plane: what is packed is read back, and nothing else gets beyond its limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.errors import InvalidRequest, Unavailable
from twostroke.kv.refs import BlockRef, BlockSlot
from twostroke.kv.transport import frames
from twostroke.kv.transport.frames import Code, Head, Names, Place, Status, Trailer

PROOF = bytes(32)
U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
BLOCKS = st.lists(
    st.builds(BlockSlot, st.builds(BlockRef, st.binary(min_size=16, max_size=16), U64, U32), U32),
    min_size=1,
    max_size=9,
)


@given(st.builds(Names, *[st.text(max_size=100)] * 3), st.binary(min_size=32, max_size=32), BLOCKS)
def test_a_request_is_read_as_it_was_asked(names: Names, proof: bytes, blocks: list[BlockSlot]) -> None:
    data = frames.request(names, proof, blocks)
    head = Head.unpack(data[: frames.HEAD_BYTES])
    assert (head.proof, head.request_bytes) == (proof, len(data))
    wanted = [Place(each.block.key, each.block.generation, each.slot) for each in blocks]
    assert head.rest(data[frames.HEAD_BYTES :]) == (names, wanted)


@given(st.binary(min_size=frames.HEAD_BYTES, max_size=frames.HEAD_BYTES), st.booleans())
def test_no_head_announces_more_than_the_largest_request(data: bytes, ours: bool) -> None:
    start = frames.request(Names("", "", ""), PROOF, [BlockSlot(BlockRef(bytes(16), 0, 0), 0)])[:10] if ours else b""
    try:
        head = Head.unpack(start + data[len(start) :])
    except InvalidRequest:
        return
    assert frames.HEAD_BYTES + frames.PLACE_BYTES <= head.request_bytes <= frames.MAX_REQUEST_BYTES


@given(st.binary(min_size=12, max_size=12))
def test_names_are_text_or_are_refused(data: bytes) -> None:
    head = Head((4, 4, 4), 1, PROOF)
    try:
        names, _ = head.rest(data + bytes(frames.PLACE_BYTES))
    except InvalidRequest:
        return
    assert "".join(names).encode() == data


@pytest.mark.parametrize(
    ("names", "proof", "count"),
    [
        pytest.param(Names("i", "é" * 300, ""), PROOF, 1, id="a long name"),
        pytest.param(Names("i", "l", ""), bytes(31), 1, id="a short proof"),
        pytest.param(Names("i", "l", ""), PROOF, 0, id="no blocks"),
        pytest.param(Names("i", "l", ""), PROOF, frames.MAX_PLACES + 1, id="too many blocks"),
    ],
)
def test_what_no_request_can_say_is_refused_before_it_is_sent(names: Names, proof: bytes, count: int) -> None:
    with pytest.raises(InvalidRequest):
        frames.request(names, proof, [BlockSlot(BlockRef(bytes(16), 1, 16), 0)] * count)


@given(st.sampled_from(Code), U64)
def test_a_status_is_read_as_it_was_said(code: Code, block_bytes: int) -> None:
    assert Status.unpack(Status(code, block_bytes).pack()) == Status(code, block_bytes)


@given(st.binary(min_size=frames.STATUS_BYTES, max_size=frames.STATUS_BYTES), st.booleans())
def test_a_status_of_another_protocol_is_none(data: bytes, ours: bool) -> None:
    data = Status(Code.OK).pack()[:10] + data[10:] if ours else data
    try:
        assert Status.unpack(data).pack() == data
    except Unavailable:
        assert not ours or int.from_bytes(data[10:12], "little") not in set(Code)


@given(st.builds(Trailer, st.booleans(), st.booleans(), U32, U64))
def test_a_trailer_is_read_as_it_was_said(trailer: Trailer) -> None:
    assert len(trailer.pack()) == frames.TRAILER_BYTES
    assert Trailer.unpack(trailer.pack()) == trailer


@given(st.sampled_from([code for code in Code if code is not Code.OK]))
def test_every_refusal_means_a_typed_error(code: Code) -> None:
    assert frames.refusal(code).message
