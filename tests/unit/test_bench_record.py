"""A benchmark keeps what it has measured, however it ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.client import BadAnswer
from bench.contenders import ours
from bench.figures import Figures, Ratio
from bench.record import Record
from twostroke.engine.matrix import WeightMode

WHO = replace(ours(WeightMode.F16), least_seconds=0.0)


def speed(figures: Figures) -> dict[str, Ratio]:
    rate = figures.median(WHO.name, "rate")
    return {} if rate is None else {"speed": Ratio(rate / 10, 2.0, "higher")}


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record("engine", "native", tmp_path / "result.json", speed)


def written(record: Record) -> dict[str, Any]:
    assert record.out is not None
    told: dict[str, Any] = json.loads(record.out.read_text())
    return told


async def one_figure_then_failure() -> AsyncGenerator[tuple[str, float], None]:
    yield "rate", 30.0
    raise BadAnswer("status 500")


async def one_figure_then_silence() -> AsyncGenerator[tuple[str, float], None]:
    yield "rate", 30.0
    await asyncio.Event().wait()


async def test_every_figure_is_in_the_file_before_the_next_is_measured(record: Record) -> None:
    async def visit() -> AsyncGenerator[tuple[str, float], None]:
        yield "rate", 30.0
        assert written(record)["rounds"] == {WHO.name: {"rate": [30.0]}}
        assert written(record)["complete"] is False
        yield "rate", 50.0

    await record.take(WHO, visit(), None)
    assert written(record)["ratios"]["speed"] == {"value": 4.0, "aim": 2.0, "better": "higher"}


async def test_what_a_failed_visit_has_told_stays_and_the_failure_is_named(record: Record) -> None:
    await record.take(WHO, one_figure_then_failure(), None)
    assert record.figures.median(WHO.name, "rate") == 30.0
    assert record.left_out == {WHO.name: "not measured to the end: status 500"}


async def test_a_visit_is_cut_when_the_time_of_the_run_is_over(record: Record) -> None:
    await record.take(WHO, one_figure_then_silence(), time.monotonic() + 0.05)
    assert record.figures.median(WHO.name, "rate") == 30.0
    assert "the time of this run is over" in record.left_out[WHO.name]


async def test_a_visit_that_does_not_fit_is_not_begun(record: Record) -> None:
    await record.take(WHO, one_figure_then_failure(), time.monotonic() - 1.0)
    assert record.figures.raw() == {}
    assert record.left_out == {WHO.name: "it does not fit into the time of this run"}


async def test_a_cancelled_visit_leaves_a_file_that_says_it_is_not_complete(record: Record) -> None:
    visit = asyncio.create_task(record.take(WHO, one_figure_then_silence(), None))
    while record.out is None or not record.out.exists():
        await asyncio.sleep(0)
    visit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await visit
    assert written(record)["complete"] is False
    assert written(record)["rounds"] == {WHO.name: {"rate": [30.0]}}


async def test_the_last_line_is_the_report_and_the_file_holds_every_round_too(
    record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    record.leave_out("a peer", "it is not here")
    record.add(WHO.name, "rate", 30.0)
    record.finish()
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["ratios"]["speed"]["value"] == 3.0
    assert last["backend"] == "native"
    assert last["left_out"] == {"a peer": "it is not here"}
    assert written(record) == last | {"complete": True, "rounds": {WHO.name: {"rate": [30.0]}}}
