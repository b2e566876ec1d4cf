"""BlockStore: the life of a slot, leases, and every bound."""

import pytest

from twostroke.errors import NotFound, Overloaded
from twostroke.kv.deadlines import Deadlines
from twostroke.kv.limits import StoreLimits
from twostroke.kv.refs import BlockRef, Reservation
from twostroke.kv.store import BlockStore

LIMITS = StoreLimits(leases=3, lease_blocks=8, lease_seconds=60.0, reservation_seconds=30.0)


def key(name: int) -> bytes:
    return name.to_bytes(16, "little")


def keys(*names: int) -> list[bytes]:
    return [key(name) for name in names]


@pytest.fixture
def store() -> BlockStore:
    made = BlockStore(4, LIMITS)
    made.open_lease("a", 10.0, now=0.0)
    return made


def stored(store: BlockStore, lease: str, *names: int, now: float = 0.0) -> list[Reservation]:
    """Reserve and commit blocks of 16 tokens."""
    slots = list(store.reserve(lease, "w", keys(*names), now).slots)
    store.commit(lease, [each.written(16) for each in slots])
    return slots


def test_a_block_is_readable_only_after_its_commit(store: BlockStore) -> None:
    slots = store.reserve("a", "w", keys(1, 2), now=0.0).slots
    assert store.lookup(keys(1, 2)) == 0
    committed = store.commit("a", [slots[0].written(16)])
    assert store.lookup(keys(1, 2)) == 1
    assert committed.leased == (BlockRef(key(1), 1, 16),)


def test_committing_twice_changes_nothing(store: BlockStore) -> None:
    written = [each.written(16) for each in store.reserve("a", "w", keys(1), now=0.0).slots]
    first, again = store.commit("a", written), store.commit("a", written)
    assert (len(first.published), len(again.published)) == (1, 0)
    assert first.leased == again.leased
    assert store.stats().committed == 1


def test_a_key_that_is_being_written_is_left_to_its_first_writer(store: BlockStore) -> None:
    store.reserve("a", "first", keys(1), now=0.0)
    second = store.reserve("a", "second", keys(1, 2), now=0.0)
    assert [each.key for each in second.slots] == keys(2)
    assert list(second.writing) == keys(1)
    assert store.writers_of(keys(1, 2, 3)) == {"first", "second"}


def test_a_key_named_twice_gets_one_slot(store: BlockStore) -> None:
    twice = store.reserve("a", "w", keys(1, 1), now=0.0)
    assert (len(twice.slots), twice.writing) == (1, ())


def test_held_keys_are_leased_and_not_written_again(store: BlockStore) -> None:
    stored(store, "a", 1)
    again = store.reserve("a", "w", keys(1, 2), now=0.0)
    assert [place.block.key for place in again.held] == keys(1)
    assert [each.key for each in again.slots] == keys(2)


def test_acquire_leases_the_longest_held_prefix_and_no_more(store: BlockStore) -> None:
    stored(store, "a", 1, 3)
    store.open_lease("b", 10.0, now=0.0)
    assert [place.block.key for place in store.acquire("b", keys(1, 2, 3))] == keys(1)
    assert store.leased("b", key(3)) is None


def test_a_leased_block_is_never_evicted_and_reserve_does_not_wait(store: BlockStore) -> None:
    stored(store, "a", 1, 2, 3, 4)
    assert store.reserve("a", "w", keys(5), now=0.0).slots == ()
    store.release(["a"])
    store.open_lease("b", 10.0, now=0.0)
    assert len(store.reserve("b", "w", keys(5), now=0.0).slots) == 1


def test_making_room_never_evicts_a_block_of_the_same_prompt(store: BlockStore) -> None:
    stored(store, "a", 1, 2, 3, 4)
    store.release(["a"])
    store.open_lease("b", 10.0, now=0.0)
    reserved = store.reserve("b", "w", keys(5, 1, 2, 3, 4), now=0.0)
    assert [place.block.key for place in reserved.held] == keys(1, 2, 3, 4)
    assert reserved.slots == ()


def test_the_least_recently_used_block_is_evicted_first_and_the_end_of_a_prompt_before_its_start() -> None:
    store = BlockStore(4, LIMITS)
    for lease, names in (("a", (1, 2)), ("b", (3, 4))):
        store.open_lease(lease, 10.0, now=0.0)
        stored(store, lease, *names)
        store.release([lease])
    store.open_lease("c", 10.0, now=0.0)
    store.acquire("c", keys(1, 2))  # a use
    store.release(["c"])
    store.open_lease("d", 10.0, now=0.0)
    order = []
    for name in range(5, 9):
        before = {each for each in range(1, 5) if store.lookup(keys(each))}
        stored(store, "d", name)
        order += before - {each for each in range(1, 5) if store.lookup(keys(each))}
    assert order == [4, 3, 2, 1]


def test_a_lookup_is_no_use(store: BlockStore) -> None:
    stored(store, "a", 1)
    store.release(["a"])
    store.open_lease("b", 10.0, now=0.0)
    stored(store, "b", 2)
    store.release(["b"])
    assert store.lookup(keys(1)) == 1
    store.open_lease("c", 10.0, now=0.0)
    stored(store, "c", 3, 4, 5)
    assert (store.lookup(keys(1)), store.lookup(keys(2))) == (0, 1)


def test_the_generation_of_a_slot_is_raised_before_it_is_given_out_again() -> None:
    store = BlockStore(1, LIMITS)
    store.open_lease("a", 10.0, now=0.0)
    first = store.reserve("a", "w", keys(1), now=0.0).slots[0]
    store.abandon([first])
    second = store.reserve("a", "w", keys(1), now=0.0).slots[0]
    assert (first.slot, first.generation + 1) == (second.slot, second.generation)
    assert store.commit("a", [first.written(16)]).published == ()
    store.abandon([first])  # an old message takes nothing away
    assert store.stats().reserved == 1


def test_an_expired_reservation_is_quarantined_until_its_writer_speaks(store: BlockStore) -> None:
    (late,) = store.reserve("a", "w", keys(1), now=0.0).slots
    store.expire(30.0)
    assert store.quarantined_writers() == {"w"}
    assert (store.stats().quarantined, store.stats().free) == (1, 3)
    assert store.commit("a", [late.written(16)]).published == ()
    assert (store.stats().quarantined, store.stats().free) == (0, 4)
    assert store.lookup(keys(1)) == 0


def test_another_writer_may_write_a_key_whose_writer_is_late(store: BlockStore) -> None:
    (late,) = store.reserve("a", "w", keys(1), now=0.0).slots
    store.expire(30.0)
    store.open_lease("b", 60.0, now=30.0)
    (second,) = store.reserve("b", "x", keys(1), now=30.0).slots
    store.commit("b", [second.written(16)])
    store.commit("b", [late.written(16)])
    assert store.leased("b", key(1)) == second.written(16)
    assert (store.stats().free, store.stats().committed) == (3, 1)


def test_a_writer_that_is_gone_gives_back_everything_it_had(store: BlockStore) -> None:
    store.reserve("a", "w", keys(1), now=0.0)
    store.expire(30.0)
    store.open_lease("b", 60.0, now=30.0)
    store.reserve("b", "w", keys(2), now=30.0)
    store.reserve("b", "x", keys(3), now=30.0)
    store.writer_gone("w")
    assert (store.stats().free, store.stats().reserved, store.stats().quarantined) == (3, 1, 0)


def test_a_block_committed_after_its_lease_has_ended_stays_for_anyone(store: BlockStore) -> None:
    slots = store.reserve("a", "w", keys(1), now=0.0).slots
    store.expire(10.0)
    committed = store.commit("a", [each.written(16) for each in slots])
    assert (len(committed.published), committed.leased) == (1, ())
    assert store.lookup(keys(1)) == 1
    assert store.stats().leased_blocks == 0


def test_what_a_lease_kept_may_go_once_its_time_is_up(store: BlockStore) -> None:
    stored(store, "a", 1)
    store.expire(9.9)
    assert store.leased("a", key(1)) is not None
    store.expire(10.0)
    assert store.leased("a", key(1)) is None
    for call in (store.acquire, lambda lease, names: store.reserve(lease, "w", names, 10.0)):
        with pytest.raises(NotFound):
            call("a", keys(1))


def test_renewing_prolongs_and_never_shortens(store: BlockStore) -> None:
    assert store.renew(["a", "gone"], 20.0, now=5.0) == ["a"]
    store.renew(["a"], 1.0, now=6.0)
    store.expire(24.9)
    assert store.renew(["a"], 1.0, now=24.9) == ["a"]
    store.expire(26.0)
    assert store.renew(["a"], 1.0, now=26.0) == []


def test_a_lease_is_bounded_in_time_and_in_blocks() -> None:
    store = BlockStore(20, LIMITS)
    assert store.open_lease("a", 1e9, now=0.0) == LIMITS.lease_seconds
    slots = store.reserve("a", "w", keys(*range(12)), now=0.0).slots
    assert len(store.commit("a", [each.written(16) for each in slots]).leased) == LIMITS.lease_blocks
    assert len(store.acquire("a", keys(*range(12)))) == LIMITS.lease_blocks
    assert (store.stats().committed, store.stats().leased_blocks) == (12, 8)


def test_leases_beyond_the_bound_are_refused_with_the_time_to_wait(store: BlockStore) -> None:
    store.open_lease("b", 4.0, now=0.0)
    store.open_lease("c", 20.0, now=0.0)
    with pytest.raises(Overloaded) as refused:
        store.open_lease("d", 1.0, now=1.0)
    assert refused.value.retry_after == 3.0


def test_a_block_stays_while_any_of_its_leases_lives(store: BlockStore) -> None:
    stored(store, "a", 1)
    store.open_lease("b", 60.0, now=0.0)
    store.acquire("b", keys(1, 1))
    store.release(["a", "a"])
    assert store.stats().leased_blocks == 1
    store.release(["b"])
    assert store.stats().leased_blocks == 0


def test_the_next_expiry_is_the_earliest_of_leases_and_reservations(store: BlockStore) -> None:
    assert store.next_expiry() == 10.0
    store.prolong("a", 60.0, now=0.0)
    store.reserve("a", "w", keys(1), now=0.0)
    assert store.next_expiry() == 30.0
    store.expire(60.0)
    assert store.next_expiry() is None


def test_deadlines_take_memory_for_what_is_alive_and_not_for_every_change() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for at in range(10_000):
        deadlines.set("a", float(at))
        deadlines.set("gone", float(at))
        deadlines.discard("gone")
    assert len(deadlines._heap) < 100
    assert deadlines.pop_due(9_999.0) == ["a"]
    assert deadlines.next() is None
