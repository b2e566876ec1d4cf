"""Which slot of the disk tier holds what, which is written next, and what a header proves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.stores import key
from twostroke.kv.tiers.header import HEADER_BYTES, NO_HEADER, Header, unpack
from twostroke.kv.tiers.index import SlotIndex

HEADERS = st.builds(
    Header,
    key=st.binary(min_size=16, max_size=16),
    serial=st.integers(0, 2**64 - 1),
    checksum=st.integers(0, 2**64 - 1),
    tokens=st.integers(0, 2**32 - 1),
)


def insert(index: SlotIndex, name: int) -> int | None:
    """Put a block where the hand says; answers which one left."""
    slot, leaving = index.next_slot()
    if leaving:
        index.drop(leaving.key)
    index.put(slot, Header(key(name), index.serial, 0, 1))
    return int.from_bytes(leaving.key, "little") if leaving else None


def held(index: SlotIndex, names: range) -> list[int]:
    return [name for name in names if key(name) in index]


@given(HEADERS, st.integers(0, 2**32))
def test_a_header_comes_back_as_it_was(header: Header, slot: int) -> None:
    raw = header.pack(slot)
    assert len(raw) == HEADER_BYTES
    assert unpack(memoryview(raw), slot) == header


@given(HEADERS, st.integers(0, 2**32), st.integers(0, 2**32))
def test_a_header_of_another_slot_is_none(header: Header, slot: int, other: int) -> None:
    if slot != other:
        assert unpack(memoryview(header.pack(slot)), other) is None


@given(HEADERS, st.integers(0, 55), st.integers(1, 255))
def test_a_header_with_one_wrong_byte_is_none(header: Header, at: int, mask: int) -> None:
    raw = bytearray(header.pack(3))
    raw[at] ^= mask
    assert unpack(memoryview(raw), 3) is None
    assert unpack(memoryview(NO_HEADER), 3) is None


@given(HEADERS, HEADERS, st.integers(1, HEADER_BYTES - 1))
def test_a_header_torn_at_any_place_is_one_of_both_or_none(old: Header, new: Header, at: int) -> None:
    torn = new.pack(5)[:at] + old.pack(5)[at:]
    assert unpack(memoryview(torn), 5) in (None, old, new)


def test_slots_are_filled_in_order_and_left_in_order() -> None:
    index = SlotIndex(3)
    assert [insert(index, name) for name in range(7)] == [None, None, None, 0, 1, 2, 3]


def test_a_block_that_was_read_stays_one_round_longer() -> None:
    index = SlotIndex(3)
    for name in range(3):
        insert(index, name)
    found = index.find(key(0))
    assert found is not None
    index.touch(found[0])
    assert [insert(index, name) for name in range(3, 6)] == [1, 2, 0]


def test_the_hand_waits_at_a_slot_until_something_is_put_there() -> None:
    index = SlotIndex(2)
    assert index.next_slot() == index.next_slot() == (0, None)


def test_what_was_found_is_left_in_the_order_in_which_it_was_written() -> None:
    found = [(0, Header(key(10), 7, 0, 1)), (1, Header(key(11), 5, 0, 1)), (2, Header(key(12), 6, 0, 1))]
    index = SlotIndex(3, found)
    assert [insert(index, name) for name in range(3)] == [11, 12, 10]
    assert index.serial == 11


def test_of_two_slots_with_one_key_the_later_counts_and_the_other_is_free() -> None:
    later, earlier = Header(key(1), 9, 1, 1), Header(key(1), 2, 2, 1)
    index = SlotIndex(2, [(0, later), (1, earlier)])
    assert len(index) == 1
    assert index.find(key(1)) == (0, later)
    assert index.next_slot() == (1, None)


@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from(["insert", "read", "drop"]), st.integers(0, 9))))
def test_every_block_has_one_slot_and_no_slot_two(slots: int, moves: list[tuple[str, int]]) -> None:
    index = SlotIndex(slots)
    for move, name in moves:
        found = index.find(key(name))
        if move == "insert" and not found:
            insert(index, name)
            assert key(name) in index
        elif move == "drop":
            index.drop(key(name))
        elif found:
            index.touch(found[0])
        places = [place for each in held(index, range(10)) if (place := index.find(key(each)))]
        assert len(index) == len(places) == len({slot for slot, _ in places}) <= slots
        assert all(0 <= slot < slots for slot, _ in places)
