"""Kernels on a GPU, held to float64 by the checks that `make gpu-check` makes; skipped where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.gpu import correct
from bench.gpu.findings import Finding, Notes, read
from bench.gpu.ground import Ground
from bench.gpu.shapes import SHAPES, Heads
from twostroke.engine.backend import Backend

pytestmark = pytest.mark.gpu


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    return Ground(emulated=False, folder=tmp_path, notes=Notes(tmp_path / "found.json"))


def missed(ground: Ground) -> list[Finding]:
    found = read(ground.folder / "found.json")
    assert found
    return [each for each in found if not each.holds]


@pytest.mark.parametrize("heads", SHAPES, ids=[heads.model for heads in SHAPES])
def test_attention_over_pages_is_near_float64(ground: Ground, heads: Heads) -> None:
    correct.attention(ground, ground.backend(), heads)
    assert not missed(ground)


@pytest.mark.parametrize(
    "check", [correct.windows, correct.captured, correct.norms, correct.rotation, correct.gates, correct.linears]
)
def test_what_a_layer_computes_is_near_float64(ground: Ground, check: Callable[[Ground, Backend], None]) -> None:
    check(ground, ground.backend())
    assert not missed(ground)


def test_pages_move_bit_for_bit(ground: Ground) -> None:
    correct.page_moves(ground)
    assert not missed(ground)
