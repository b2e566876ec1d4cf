"""BlockStore: namespaces, transient blocks, advice, and those who wait."""

import pytest

from twostroke.errors import Overloaded
from twostroke.kv.limits import StoreLimits
from twostroke.kv.refs import Terms
from twostroke.kv.store import BlockStore

LIMITS = StoreLimits(leases=50, keep_seconds=100.0, waiting=2)
TRANSIENT = Terms(transient=True)


def keys(*names: int) -> list[bytes]:
    return [name.to_bytes(16, "little") for name in names]


def opened(store: BlockStore) -> str:
    lease = f"lease-{store.stats().leases}"
    store.open_lease(lease, 60.0, now=0.0)
    return lease


def stored(store: BlockStore, *names: int, namespace: str = "default") -> int:
    """Write blocks under a lease of their own and let go; answers how many were stored."""
    lease = opened(store)
    slots = store.reserve(lease, "w", keys(*names), 0.0, Terms(namespace=namespace)).slots
    store.commit(lease, [each.written(16) for each in slots])
    store.release([lease])
    return len(slots)


def transient(store: BlockStore, *names: int) -> str:
    """Write transient blocks; answers their lease."""
    lease = opened(store)
    slots = store.reserve(lease, "w", keys(*names), 0.0, TRANSIENT).slots
    store.commit(lease, [each.written(16) for each in slots])
    return lease


def held(store: BlockStore, names: range) -> int:
    return sum(store.lookup(keys(name)) for name in names)


def test_a_large_namespace_pushes_out_its_own_blocks_and_never_those_of_a_smaller_one() -> None:
    store = BlockStore(10, LIMITS)
    small, large = range(3), range(100, 200)
    stored(store, *small, namespace="small")
    for name in large:
        assert stored(store, name, namespace="large") == 1
    assert (held(store, small), held(store, large)) == (3, 7)


def test_a_newcomer_gets_its_share_from_the_largest_and_then_evicts_its_own() -> None:
    store = BlockStore(12, LIMITS)
    stored(store, *range(9), namespace="large")
    stored(store, *range(20, 23), namespace="small")
    for name in range(40, 60):
        assert stored(store, name, namespace="new") == 1
    assert (held(store, range(9)), held(store, range(20, 23)), held(store, range(40, 60))) == (4, 3, 5)


def test_a_namespace_at_its_quota_evicts_its_own_or_gets_nothing_though_slots_are_free() -> None:
    store = BlockStore(10, StoreLimits(namespace_share=0.3))
    lease = opened(store)
    assert len(store.reserve(lease, "w", keys(1, 2, 3, 4), 0.0).slots) == 3
    assert (store.stats().free, store.stats().quota_refusals) == (7, 1)
    store.writer_gone("w")
    assert stored(store, 1, 2) == 2
    assert stored(store, 3, 4) == 2
    assert (held(store, range(1, 5)), store.stats().free, store.stats().evictions) == (3, 7, 1)


def test_a_namespace_is_known_for_as_long_as_it_holds_a_slot() -> None:
    store = BlockStore(2, LIMITS)
    for name in range(20):
        stored(store, name, namespace=f"tenant {name}")
        assert store.stats().namespaces == min(name + 1, 2)


def test_a_block_that_comes_back_soon_after_its_eviction_is_counted() -> None:
    store = BlockStore(4, LIMITS)
    stored(store, 1, 2, 3, 4)
    stored(store, 5)
    stored(store, 4)  # the end of the prompt went
    assert store.stats().ghost_hits == 1


def test_a_transient_block_is_seen_under_its_leases_only_and_is_gone_with_the_last() -> None:
    store = BlockStore(4, LIMITS)
    first = transient(store, 1, 2)
    assert (store.lookup(keys(1, 2)), store.lookup(keys(1, 2), first)) == (0, 2)
    assert store.lookup(keys(1, 2), "ended") == 0
    other = opened(store)
    assert store.acquire(other, keys(1)) == []
    assert len(store.acquire(first, keys(1, 2))) == 2
    assert len(store.reserve(other, "x", keys(1), 0.0, TRANSIENT).held) == 1  # it has computed the same
    store.release([first])
    assert (store.stats().committed, store.stats().free, store.lookup(keys(1), other)) == (1, 3, 1)
    store.release([other])
    assert (store.stats().free, store.stats().namespaces) == (4, 0)


def test_a_transient_block_without_its_lease_is_dropped_at_its_commit() -> None:
    store = BlockStore(4, LIMITS)
    lease = opened(store)
    slots = store.reserve(lease, "w", keys(1), 0.0, TRANSIENT).slots
    store.release([lease])
    assert store.commit(lease, [slots[0].written(16)]).published == ()
    assert store.stats().free == 4


@pytest.mark.parametrize("committed", [True, False])
def test_a_writer_whose_block_shall_stay_makes_a_transient_one_stay(committed: bool) -> None:
    store = BlockStore(4, LIMITS)
    first, other = opened(store), opened(store)
    slots = store.reserve(first, "w", keys(1), 0.0, TRANSIENT).slots
    if committed:
        store.commit(first, [slots[0].written(16)])
    assert len(store.reserve(other, "x", keys(1), 0.0).held) == committed
    store.commit(first, [slots[0].written(16)])
    store.release([first, other])
    assert store.lookup(keys(1)) == 1


def test_an_ordinary_block_is_used_by_a_writer_of_transient_ones() -> None:
    store = BlockStore(4, LIMITS)
    stored(store, 1)
    lease = transient(store, 1, 2)
    assert store.lookup(keys(1, 2), lease) == 2
    store.release([lease])
    assert (store.lookup(keys(1, 2)), store.stats().free) == (1, 3)


def test_kept_blocks_go_last_until_their_time_is_up_and_hints_are_accounted_for() -> None:
    store = BlockStore(8, LIMITS)
    stored(store, 1, 2, 3)
    assert store.keep("default", keys(1, 2, 3), 1e9, now=0.0) == 2  # a quarter of eight slots
    assert store.keep("another", keys(1, 2), 10.0, now=0.0) == 0
    for name in range(10, 30):
        stored(store, name)
    assert (store.lookup(keys(1, 2)), store.stats().kept) == (2, 2)
    lease = opened(store)
    store.acquire(lease, keys(1, 2))
    store.release([lease])
    assert store.stats().honoured_keeps == 2
    store.expire(99.9)
    assert (store.stats().kept, store.next_expiry()) == (2, 100.0)
    store.expire(100.0)
    assert (store.stats().kept, store.stats().expired_keeps) == (0, 2)


def test_a_keep_can_be_prolonged_and_ended_but_not_shortened() -> None:
    store = BlockStore(8, LIMITS)
    stored(store, 1)
    store.keep("default", keys(1), 50.0, now=0.0)
    store.keep("default", keys(1), 1.0, now=0.0)
    assert store.next_expiry() == 50.0
    store.keep("default", keys(1), 60.0, now=0.0)
    assert store.next_expiry() == 60.0
    assert store.keep("default", keys(1), 0.0, now=0.0) == 0
    assert (store.stats().kept, store.next_expiry()) == (0, None)


def test_kept_blocks_are_no_hard_pin() -> None:
    store = BlockStore(4, StoreLimits(keep_share=1.0))
    stored(store, 1, 2, 3, 4)
    assert store.keep("default", keys(1, 2, 3, 4), 60.0, now=0.0) == 4
    assert stored(store, 5, 6) == 2
    assert (store.lookup(keys(1, 2)), store.stats().kept) == (2, 2)


def test_forgotten_blocks_go_first_unless_they_are_used_again() -> None:
    store = BlockStore(6, LIMITS)
    stored(store, 1, 2)
    stored(store, 3, 4, 5, 6)
    assert store.forget("another", keys(3)) == 0
    assert store.forget("default", keys(3, 4, 5, 9)) == 3
    lease = opened(store)
    store.acquire(lease, keys(3))
    assert store.forget("default", keys(3)) == 0  # a lease keeps it
    store.release([lease])
    stored(store, 10, 11)
    assert [store.lookup(keys(name)) for name in (1, 2, 3, 4, 5, 6)] == [1, 1, 1, 0, 0, 1]


class Bell:
    """Counts how often it rang."""

    rung = 0

    def ring(self) -> None:
        self.rung += 1


def test_who_waits_is_woken_when_the_last_block_is_there() -> None:
    store, bell = BlockStore(4, LIMITS), Bell()
    lease = opened(store)
    waiter = store.wait(keys(1, 2), bell.ring)
    for name in (1, 2):
        assert bell.rung == 0
        slots = store.reserve(lease, "w", keys(name), 0.0).slots
        assert bell.rung == 0
        store.commit(lease, [each.written(16) for each in slots])
    assert bell.rung == 1
    store.leave(waiter)
    store.wait(keys(1, 2), bell.ring)
    assert bell.rung == 2  # everything was there


@pytest.mark.parametrize("end", ["abandoned", "late", "gone", "transient"])
def test_who_waits_is_woken_when_the_writer_gives_up_and_nobody_else_is_writing(end: str) -> None:
    store, bell = BlockStore(4, LIMITS), Bell()
    lease = opened(store)
    terms = TRANSIENT if end == "transient" else Terms()
    slots = store.reserve(lease, "w", keys(1), 0.0, terms).slots
    store.wait(keys(1, 2), bell.ring)
    other = store.reserve(lease, "x", keys(2), 0.0).slots
    if end == "abandoned":
        store.abandon(slots)
    elif end == "gone":
        store.writer_gone("w")
    elif end == "transient":
        store.commit(lease, [slots[0].written(16)])
    else:
        store.expire(30.0)
    assert bell.rung == (end == "late")  # then the other one is late too
    store.abandon(other)
    assert bell.rung == 1


def test_who_waits_for_blocks_that_nobody_has_begun_is_left_to_its_own_time() -> None:
    store, bell = BlockStore(4, LIMITS), Bell()
    stored(store, 1)
    store.wait(keys(1, 2), bell.ring)
    assert bell.rung == 0


def test_who_waits_is_woken_when_a_block_that_was_there_is_evicted() -> None:
    store, bell = BlockStore(2, LIMITS), Bell()
    stored(store, 1)
    store.wait(keys(1, 2), bell.ring)
    stored(store, 5, 6)
    assert bell.rung == 1


def test_the_number_of_those_who_wait_is_bounded() -> None:
    store, bell = BlockStore(2, LIMITS), Bell()
    first = store.wait(keys(1), bell.ring)
    store.wait(keys(1), bell.ring)
    with pytest.raises(Overloaded):
        store.wait(keys(1), bell.ring)
    store.leave(first)
    store.wait(keys(1), bell.ring)
    assert store.stats().waiting == 2
