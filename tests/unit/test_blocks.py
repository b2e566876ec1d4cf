from __future__ import annotations

import pytest

from twostroke.engine.blocks import SCRATCH_PAGE, BlockPool, CachedPage
from twostroke.engine.loans import PageLoans
from twostroke.errors import Internal


def cached(pool: BlockPool, *keys: bytes) -> list[int]:
    """Pages known by `keys`, evictable in this order."""
    pages = pool.take(len(keys))
    assert pages is not None
    for page, key in zip(pages, keys, strict=True):
        pool.publish(page, key, 4)
    pool.release(pages)
    return pages


def test_the_scratch_page_is_never_given_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.take(4) or ()) == [1, 2, 3, 4]
    assert SCRATCH_PAGE == 0
    assert pool.capacity == 4


def test_too_few_pages_gives_none_and_changes_nothing() -> None:
    pool = BlockPool(4)
    cached(pool, b"a")
    assert pool.take(4) is None
    assert (pool.free, pool.evictable) == (2, 1)
    assert pool.match([b"a"])


def test_free_pages_go_before_cached_ones_and_the_least_recently_used_goes_first() -> None:
    pool = BlockPool(5)
    first, _, _ = cached(pool, b"a", b"b", b"c")
    pool.hold([first])
    pool.release([first])  # used again
    pool.take(1)
    assert pool.evictable == 3
    pool.take(2)
    assert pool.match([b"a"]) == [first]
    assert pool.find(b"b") is None
    assert pool.find(b"c") is None


def test_a_page_that_changes_hands_takes_its_key_out_of_the_index_with_it() -> None:
    pool = BlockPool(2)
    (page,) = cached(pool, b"old")
    assert pool.take(1) == [page]
    assert pool.find(b"old") is None
    pool.publish(page, b"new", 4)
    assert pool.find(b"new") == CachedPage(page, 4)
    pool.check_integrity()


def test_a_match_stops_at_the_first_missing_key_and_changes_nothing() -> None:
    pool = BlockPool(6)
    a, b, _ = cached(pool, b"a", b"b", b"d")
    before = (pool.free, pool.evictable)
    assert pool.match([b"a", b"b", b"c", b"d"]) == [a, b]
    assert (pool.free, pool.evictable) == before


def test_a_shared_page_stays_until_its_last_owner_leaves() -> None:
    pool = BlockPool(3)
    (page,) = pool.take(1) or []
    pool.publish(page, b"k", 4)
    pool.hold([page])
    pool.release([page])
    assert pool.evictable == 0
    pool.release([page])
    assert pool.evictable == 1


def test_the_first_page_under_a_key_wins_and_the_second_is_freed_without_it() -> None:
    pool = BlockPool(3)
    first, second = pool.take(2) or []
    assert pool.publish(first, b"k", 4)
    assert not pool.publish(second, b"k", 4)
    pool.release([second, first])
    assert (pool.free, pool.evictable) == (1, 1)
    assert pool.match([b"k"]) == [first]
    pool.check_integrity()


@pytest.mark.parametrize("page", [0, 1, 99])
def test_a_page_that_nobody_holds_cannot_be_released_held_or_published(page: int) -> None:
    pool = BlockPool(3)
    with pytest.raises(Internal):
        pool.release([page])
    with pytest.raises(Internal):
        pool.hold([page])
    with pytest.raises(Internal):
        pool.publish(page, b"k", 4)
    pool.check_integrity()


def test_a_page_takes_only_one_key() -> None:
    pool = BlockPool(3)
    (page,) = pool.take(1) or []
    pool.publish(page, b"k", 4)
    with pytest.raises(Internal):
        pool.publish(page, b"other", 4)


def test_reset_forgets_all_content_and_leaves_owners_their_pages() -> None:
    pool = BlockPool(5)
    cached(pool, b"a", b"b")
    (page,) = pool.take(1) or []
    pool.publish(page, b"c", 4)
    pool.reset()
    assert (pool.free, pool.evictable) == (3, 0)
    assert pool.match([b"a"]) == pool.match([b"c"]) == []
    pool.release([page])
    assert pool.free == 4
    pool.check_integrity()


def test_pages_are_lent_as_far_as_they_go_and_adopted_ones_become_cached() -> None:
    pool = BlockPool(4)
    loans = PageLoans(pool)
    pages = loans.take(9)
    assert len(pages) == loans.count == 3
    assert loans.take(1) == []
    loans.adopt([(pages[0], b"a", 4), (pages[1], b"b", 2)])
    loans.give_back([pages[2]])
    assert (pool.free, pool.evictable, loans.count) == (1, 2, 0)
    assert pool.find(b"b") == CachedPage(pages[1], 2)


def test_adopted_blocks_are_evicted_from_the_end_of_their_chain() -> None:
    pool = BlockPool(3)
    loans = PageLoans(pool)
    first, second = loans.take(2)
    loans.adopt([(first, b"a", 4), (second, b"b", 4)])
    pool.take(1)
    assert pool.match([b"a", b"b"]) == [first]


def test_a_loan_given_back_twice_is_an_error_and_takes_nobodys_page() -> None:
    pool = BlockPool(3)
    loans = PageLoans(pool)
    (page,) = pool.take(1) or []  # a sequence's
    loans.lend([page])
    loans.give_back([page])
    with pytest.raises(Internal):
        loans.give_back([page])
    with pytest.raises(Internal):
        loans.adopt([(page, b"k", 4)])
    assert pool.free == 1
