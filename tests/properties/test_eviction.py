"""EvictionQueue: what is in use stays through a scan, ends of prompts go first, and nothing grows without bound."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from bench.eviction import Cache, LeastRecentlyUsed, prompt_of
from twostroke.kv.eviction import EvictionQueue


@given(
    slots=st.integers(100, 300),
    in_use=st.floats(0.1, 0.8),  # what is used once has a tenth to itself, beside what a lease takes out meanwhile
    blocks=st.integers(1, 8),
    times=st.integers(3, 10),
    scanned=st.integers(1, 5),
)
def test_a_working_set_stays_through_a_scan_of_many_times_the_arena_where_lru_loses_all_of_it(
    slots: int, in_use: float, blocks: int, times: int, scanned: int
) -> None:
    working = [prompt_of(f"working {index}", blocks) for index in range(int(slots * in_use / blocks))]
    scan = [prompt_of(f"scan {index}", scanned) for index in range(times * slots // scanned)]
    ours, theirs = Cache(EvictionQueue(), slots), Cache(LeastRecentlyUsed(), slots)
    for cache in (ours, theirs):
        cache.serve_all(chain(working, working, scan))
    assert ours.serve_all(working) == len(working) * blocks
    assert theirs.serve_all(working) == 0


@given(slots=st.integers(100, 400), prompts=st.integers(5, 15))
def test_amid_scans_that_outnumber_it_a_working_set_is_learned(slots: int, prompts: int) -> None:
    blocks = slots // (2 * prompts)
    working = [prompt_of(f"working {index}", blocks) for index in range(prompts)]
    trace = []
    for index in range(30 * prompts):  # between two uses of a prompt lies half as much again as the arena has slots
        trace.append(working[index % prompts])
        trace += [prompt_of(f"scan {index}.{part}", blocks) for part in range(2)]
    ours, theirs = (Cache(policy, slots).serve_all(trace) for policy in (EvictionQueue(), LeastRecentlyUsed()))
    most = 29 * prompts * blocks
    assert ours >= 0.9 * most
    assert theirs == 0


@given(st.lists(st.integers(1, 6), min_size=1, max_size=10), st.booleans())
def test_the_end_of_a_prompt_goes_before_its_start(lengths: list[int], used_again: bool) -> None:
    prompts = [prompt_of(str(index), blocks) for index, blocks in enumerate(lengths)]
    queue = EvictionQueue()
    cache = Cache(queue, sum(lengths))
    cache.serve_all(prompts * (1 + used_again))
    assert [queue.evict() for _ in range(sum(lengths))] == [key for each in prompts for key in reversed(each)]


ACTIONS = st.sampled_from(["add", "lease", "end", "evict", "keep", "unkeep", "forget"])


@given(st.lists(st.tuples(ACTIONS, st.integers(0, 12)), max_size=200))
def test_advice_is_taken_and_no_ghost_outnumbers_the_blocks(steps: list[tuple[str, int]]) -> None:
    queue = EvictionQueue()
    held, leased, kept, forgotten = set[bytes](), set[bytes](), set[bytes](), set[bytes]()
    for action, name in steps:
        key = name.to_bytes(16, "little")
        if action == "add" and key not in held:
            queue.add(key)
            held.add(key)
        elif action == "lease" and key in held - leased:
            queue.pin(key)
            queue.use(key)
            leased.add(key)
            forgotten.discard(key)
        elif action == "end" and key in leased:
            queue.unpin(key)
            leased.remove(key)
        elif action == "keep" and key in held:
            queue.keep(key)
            kept.add(key)
            forgotten.discard(key)
        elif action == "unkeep" and key in kept:
            queue.unkeep(key)
            kept.remove(key)
        elif action == "forget" and key in held:
            assert queue.forget(key) == (key not in leased)
            if key not in leased:
                forgotten.add(key)
                kept.discard(key)
        elif action == "evict":
            could = held - leased
            victim = queue.evict()
            assert (victim is None) == (not could)
            if victim is not None:
                first, plain = could & forgotten, could - kept
                assert victim in (first or plain or could)
                for each in (held, kept, forgotten):
                    each.discard(victim)
        assert len(queue) == len(held - leased)
        assert max(len(queue._once_ghost), len(queue._again_ghost)) <= len(held)
