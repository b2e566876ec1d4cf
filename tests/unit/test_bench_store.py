"""What the store's benchmark concludes from figures, and which blocks its calls move."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from bench.figures import Figures, Ratio
from bench.processes import DidNotServe
from bench.store import verdict
from bench.store.ground import BLOCK_BYTES, BLOCKS, COUNTS, NotMoved, aligned, require, spans
from bench.store.link import NoLink, linked
from bench.store.rivals import Engine, awake


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


def test_our_tcp_is_held_against_every_engine_that_was_measured_over_tcp() -> None:
    figures = figures_of(**{verdict.PEER_TCP: 2.0, verdict.NIXL: 1.0, verdict.MOONCAKE: 4.0, verdict.NIXL_NEAR: 8.0})
    assert verdict.ratios(figures) == {
        "peer TCP / NIXL, TCP, 512 blocks": Ratio(2.0, 1.0, "higher"),
        "peer TCP / Mooncake, TCP, 512 blocks": Ratio(0.5, 1.0, "higher"),
    }


async def test_an_engine_that_is_not_set_up_is_named_and_left_out(tmp_path: Path) -> None:
    with pytest.raises(DidNotServe, match="make peers"):
        async with awake(Engine("nixl", tmp_path / "python")):
            pass


def test_pages_lie_where_torch_would_put_them() -> None:
    rows = aligned(2)
    assert rows.ctypes.data % 64 == 0
    assert rows.shape == (2, BLOCK_BYTES)


def test_a_place_behind_a_link_is_reached_by_its_address_and_gone_afterwards() -> None:
    with contextlib.ExitStack() as stack:
        try:
            place = stack.enter_context(linked())
        except NoLink as error:
            pytest.skip(str(error))
        listen = (
            "import socket; s = socket.create_server(('0.0.0.0', 4321)); print(flush=True); s.accept()[0].send(b'!')"
        )
        there = stack.enter_context(
            subprocess.Popen((*place.prefix, sys.executable, "-c", listen), stdout=subprocess.PIPE)
        )
        stack.callback(there.kill)
        assert there.stdout is not None
        there.stdout.readline()
        with socket.create_connection((place.address, 4321), timeout=10) as connected:
            assert connected.recv(1) == b"!"
    assert place.prefix[-1] not in subprocess.run(("ip", "netns"), capture_output=True, check=True, text=True).stdout


def test_a_rate_is_told_in_microseconds_a_block_too() -> None:
    assert verdict.micros(0.36864) == pytest.approx(1_000.0)


def test_blocks_that_did_not_move_are_no_measurement() -> None:
    require(3, range(3), "get")
    with pytest.raises(NotMoved, match="get: 2 of 3 blocks"):
        require(2, range(3), "get")
