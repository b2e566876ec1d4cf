"""The router's guess of which worker holds which blocks."""

from __future__ import annotations

import os
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from twostroke.routing.index import PrefixIndex

WORKERS = ("a", "b", "c")
PROMPTS = [tuple(b"%d-%d" % (prompt, block) for block in range(1 + prompt)) for prompt in range(6)]
RECORDS = st.lists(st.tuples(st.sampled_from(WORKERS), st.sampled_from(PROMPTS)), max_size=30)
ROOMY = 100  # more keys than all prompts have


def recorded(records: list[tuple[str, tuple[bytes, ...]]], max_keys: int) -> PrefixIndex:
    index = PrefixIndex(max_keys)
    for worker, keys in records:
        index.record(worker, keys)
    return index


@given(RECORDS)
def test_with_room_it_knows_exactly_what_was_recorded(records: list[tuple[str, tuple[bytes, ...]]]) -> None:
    index = recorded(records, ROOMY)
    for worker in WORKERS:
        for keys in PROMPTS:
            assert index.matched(worker, keys) == (len(keys) if (worker, keys) in records else 0)
    assert len(index) == len({key for _, keys in records for key in keys})


@given(RECORDS, st.sampled_from(WORKERS))
def test_a_forgotten_worker_holds_nothing_and_the_others_what_they_held(
    records: list[tuple[str, tuple[bytes, ...]]], lost: str
) -> None:
    index, without = recorded(records, ROOMY), recorded([each for each in records if each[0] != lost], ROOMY)
    index.forget(lost)
    assert len(index) == len(without)
    for worker in WORKERS:
        for keys in PROMPTS:
            assert index.matched(worker, keys) == without.matched(worker, keys)


@given(RECORDS.filter(bool), st.integers(1, 8))
def test_it_never_holds_more_keys_than_told_and_the_latest_prompt_from_its_start(
    records: list[tuple[str, tuple[bytes, ...]]], max_keys: int
) -> None:
    index = recorded(records, max_keys)
    worker, keys = records[-1]
    assert len(index) <= max_keys
    assert index.matched(worker, keys) == min(len(keys), max_keys)


def test_a_match_ends_at_the_first_block_that_is_not_there() -> None:
    index = PrefixIndex(ROOMY)
    index.record("a", (b"1", b"2"))
    index.record("b", (b"1",))
    assert index.matched("a", (b"1", b"2", b"3")) == 2
    assert index.matched("b", (b"1", b"2", b"3")) == 1
    assert index.matched("a", (b"0", b"1", b"2")) == 0
    assert index.matched("a", ()) == 0


def test_a_hundred_workers_are_told_apart() -> None:
    index, workers = PrefixIndex(ROOMY), [f"worker-{at}" for at in range(100)]
    for worker in workers[::2]:
        index.record(worker, (b"1", b"2"))
    index.forget(workers[64])
    index.forget(workers[1])
    holding = {worker for worker in workers if index.matched(worker, (b"1", b"2")) == 2}
    assert holding == set(workers[::2]) - {workers[64]}


def test_a_key_takes_little_memory_beside_itself() -> None:
    """A router remembers many: all of them together must not weigh more than the rest of it."""
    index, count = PrefixIndex(20_000), 20_000
    tracemalloc.start()
    try:
        for _ in range(count // 10):
            keys = [os.urandom(16) for _ in range(10)]
            index.record("prefill-1", keys)
            index.record("decode-1", keys)
        assert tracemalloc.get_traced_memory()[0] / count < 300  # bytes; a set for each took over 400
    finally:
        tracemalloc.stop()
