"""Breaker: when Redis is given up, taken back, and tried again."""

from __future__ import annotations

from services.kvstore.directory.breaker import FIRST_PAUSE_SECONDS, MAX_FAILURES, Breaker, State


def breaker(draw: float = 0.0, longest: float = 5.0) -> Breaker:
    return Breaker(longest, lambda: draw)


def test_nothing_is_asked_before_the_first_probe_went_through() -> None:
    each = breaker()
    assert not each.up
    assert each.close()
    assert each.state is State.UP


def test_several_failures_in_a_row_open_it_once() -> None:
    each = breaker()
    each.close()
    assert [each.failed() for _ in range(MAX_FAILURES + 1)] == [*[False] * (MAX_FAILURES - 1), True, False]
    assert each.state is State.DOWN


def test_an_answer_between_failures_keeps_it_closed() -> None:
    each = breaker()
    each.close()
    for _ in range(10):
        for _ in range(MAX_FAILURES - 1):
            assert not each.failed()
        each.answered()
    assert each.up


def test_only_changes_are_news() -> None:
    each = breaker()
    assert [each.open(), each.open(), each.close(), each.close()] == [True, False, True, False]


def test_pauses_double_up_to_a_limit() -> None:
    each = breaker(longest=1.5)
    assert [each.pause() for _ in range(5)] == [FIRST_PAUSE_SECONDS, 0.5, 1.0, 1.5, 1.5]
    for _ in range(5_000):
        each.pause()
    assert each.pause() == 1.5


def test_chance_takes_up_to_half_of_a_pause() -> None:
    assert breaker(draw=0.999).pause() > FIRST_PAUSE_SECONDS / 2
    assert breaker(draw=0.5).pause() == FIRST_PAUSE_SECONDS * 0.75


def test_pauses_are_short_again_only_after_a_heartbeat_that_found_it_closed() -> None:
    each = breaker()
    each.pause()
    each.close()
    each.open()
    assert each.pause() == 2 * FIRST_PAUSE_SECONDS
    each.close()
    each.close()
    each.open()
    assert each.pause() == FIRST_PAUSE_SECONDS
