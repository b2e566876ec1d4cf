"""What the engine benchmark concludes from figures: bounds, ratios, and what is left out."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from bench import steps
from bench.ceilings import Ceilings, matrix_bytes
from bench.contenders import MANY_STREAMS, line_up, part_of_name, peers
from bench.engine import F16, INT8, VLLM, compare
from bench.figures import Figures, Ratio
from bench.inprocess import InProcess
from bench.loads import MEMORY, START, decode_rate, prefill_rate
from twostroke.engine.matrix import WeightMode

Q4, F16_PEER = "llama.cpp Q4_1", "llama.cpp F16"


@pytest.fixture(scope="module")
def here() -> InProcess:
    return InProcess(
        threads=2,
        ceilings=Ceilings(read_gb=(1.0, 2.0), gemm_f32=(3.0, 6.0), gemm_bf16=(0.0, 0.0), gemm_int8=(0.0, 0.0)),
        weights_gb=1.5,
        loaded=steps.tiny_model(),
        contexts={128: 1.0, 1_024: 3.0},
        host={1: 0.5, 32: 1.0},
    )


def figures_of(**values: dict[str, float]) -> Figures:
    figures = Figures()
    for who, measured in values.items():
        figures.add(who, measured)
    return figures


def ratios(figures: Figures, here: InProcess) -> dict[str, Ratio]:
    return compare(figures, here, (F16, INT8, VLLM, Q4))


def test_without_peers_only_bounds_are_compared(here: InProcess) -> None:
    figures = figures_of(**{F16: {prefill_rate(256): 100.0, decode_rate(8): 10.0, START: 1.0, MEMORY: 1.0}})
    assert set(ratios(figures, here)) == {
        "f16 prefill 256 / f32 product",
        "f16 prefill 256 / product bound",
        "step growth to 1024 / byte growth",
        "host's part of a step of 32 / 3 ms",
    }


def test_the_better_of_our_modes_is_held_against_the_best_peer(here: InProcess) -> None:
    rate = prefill_rate(256)
    figures = figures_of(**{F16: {rate: 300.0}, INT8: {rate: 400.0}, VLLM: {rate: 100.0}, Q4: {rate: 200.0}})
    assert ratios(figures, here)["prefill 256 / best peer"] == Ratio(2.0, 2.0, "higher")


def test_a_peer_that_is_absent_takes_its_ratios_with_it_and_no_others(here: InProcess) -> None:
    mine = {decode_rate(1): 10.0, START: 1.0, MEMORY: 1.0}
    without = ratios(figures_of(**{F16: mine, INT8: mine, Q4: {decode_rate(1): 5.0, START: 1.0}}), here)
    assert without["int8 decode B=1 / best peer"].value == 2.0
    assert not any("vllm" in name for name in without)


def test_peers_that_were_not_set_up_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peers.PEERS", tmp_path)
    assert peers() == ((), (VLLM, Q4, F16_PEER))
    contenders, left_out = line_up((WeightMode.F16,), MANY_STREAMS)
    assert [each.name for each in contenders] == [F16]
    assert set(left_out) == {VLLM, Q4, F16_PEER}


def test_only_those_who_are_asked_for_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peers.PEERS", tmp_path)
    contenders, left_out = line_up((WeightMode.F16, WeightMode.INT8), MANY_STREAMS, ["int8", "vllm"])
    assert [each.name for each in contenders] == [INT8]
    assert left_out[F16] == left_out[Q4] == "others were asked for"
    assert "make peers" in left_out[VLLM]


def test_a_word_that_is_in_nobodys_name_is_refused() -> None:
    assert part_of_name("vllm") == "vllm"
    with pytest.raises(argparse.ArgumentTypeError, match="in no name of twostroke"):
        part_of_name("tensorrt")


def test_few_streams_are_bound_by_bytes_and_many_by_products(here: InProcess) -> None:
    read = 2e9 / matrix_bytes(here.loaded.config, WeightMode.F32)
    assert here.decode_bound(1).rate == pytest.approx(read)
    assert here.decode_bound(4).rate == pytest.approx(4 * read)
    assert here.decode_bound(1_000).kind == "f32 product"


def test_products_of_parts_are_the_bound_where_they_are_faster_and_float32_stays_the_yardstick(here: InProcess) -> None:
    tiles = replace(here, ceilings=replace(here.ceilings, gemm_bf16=(18.0, 36.0)))
    assert here.prefill_bound(64).kind == "f32 product"
    assert tiles.prefill_bound(64).kind == "bf16 products in parts"
    assert tiles.prefill_bound(64).rate == pytest.approx(2 * here.prefill_bound(64).rate)
    assert tiles.f32_prefill(64) == here.f32_prefill(64) == here.prefill_bound(64).rate


@pytest.mark.parametrize(("better", "met"), [("higher", False), ("lower", True)])
def test_an_aim_is_met_from_its_own_side(better: str, met: bool) -> None:
    assert Ratio(1.0, 2.0, "higher" if better == "higher" else "lower").met is met
