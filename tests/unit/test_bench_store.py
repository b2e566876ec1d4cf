"""What the store's benchmark concludes from figures, and which blocks its calls move."""

from __future__ import annotations

from itertools import chain

import pytest

from bench.figures import Figures, Ratio
from bench.store import verdict
from bench.store.ground import BLOCK_BYTES, BLOCKS, COUNTS, NotMoved, require, spans


def figures_of(**gb: float) -> Figures:
    figures = Figures()
    for who, value in gb.items():
        figures.add(who, {verdict.rate(512): value})
    return figures


def test_a_block_has_360_kib() -> None:
    assert BLOCK_BYTES == 360 << 10


@pytest.mark.parametrize("count", COUNTS)
def test_calls_stay_within_the_pages_and_all_pages_have_their_turn(count: int) -> None:
    moved = [span for round_ in range(BLOCKS) for span in spans(round_, count)]
    assert all(len(span) == count and 0 <= span.start < span.stop <= BLOCKS for span in moved)
    assert set(chain.from_iterable(moved)) == set(range(BLOCKS))


def test_each_way_is_held_against_what_it_cannot_beat() -> None:
    figures = figures_of(**{verdict.MEMCPY: 10.0, verdict.ARENA_GET: 8.0, verdict.RAW: 4.0, verdict.PEER_GRPC: 1.0})
    assert verdict.ratios(figures) == {
        "arena get / memcpy, 512 blocks": Ratio(0.8, 0.7, "higher"),
        "peer gRPC / raw socket, 512 blocks": Ratio(0.25, 0.4, "higher"),
    }


def test_without_redis_only_its_ratios_are_left_out() -> None:
    figures = figures_of(**{verdict.RAW: 4.0, verdict.PEER_TCP: 3.0})
    figures.add(verdict.CALLS, {verdict.LOOKUP: 2.5, verdict.CONTROL: 0.5, verdict.BARE: 0.25})
    assert verdict.ratios(figures) == {
        "peer TCP / raw socket, 512 blocks": Ratio(0.75, 0.8, "higher"),
        "lookup of 12,500 / 5 ms": Ratio(0.5, 1.0, "lower"),
        "control round trip / bare call": Ratio(2.0, 1.3, "lower"),
    }


def test_a_rate_is_told_in_microseconds_a_block_too() -> None:
    assert verdict.micros(0.36864) == pytest.approx(1_000.0)


def test_blocks_that_did_not_move_are_no_measurement() -> None:
    require(3, range(3), "get")
    with pytest.raises(NotMoved, match="get: 2 of 3 blocks"):
        require(2, range(3), "get")
