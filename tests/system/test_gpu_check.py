"""The script that checks a GPU, rehearsed on a CPU: that it runs to its end, and what it leaves when it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.__main__ import run_stage
from bench.gpu.findings import Finding, Notes, read
from bench.gpu.stages import STAGES, Stage
from tests.support.emulated import emulated_package

ROOT = Path(__file__).parents[2]
THREADS = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def installed() -> None:
    emulated_package()  # skips where FlashInfer is not installed


@pytest.mark.timeout(300)
def test_the_whole_check_runs_emulated_and_says_that_no_gpu_was_used(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu", "--emulate", "--out", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, env={**os.environ, **THREADS}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "rehearsal on a CPU, no GPU was used: every bound held" in ended.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["emulated"]
    assert list(results["stages"]) == [stage.name for stage in STAGES]
    assert all(results["stages"].values())


def test_a_stage_at_its_limit_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    stage = Stage("serve", "four services", 3)
    assert not run_stage(stage, tmp_path, {**os.environ, **THREADS}, left=60.0, emulate=True)
    assert not [command for command in _commands() if str(tmp_path) in command]


def test_no_stage_begins_that_could_not_end_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not run_stage(Stage("probe", "look around", 40), tmp_path, os.environ, left=10.0, emulate=True)
    assert "left out" in capsys.readouterr().out
    assert not read(tmp_path / "probe.json")


def test_a_part_that_fails_is_a_finding_and_the_next_part_still_runs(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "stage.json")
    with notes.part("first"):
        raise RuntimeError("no such kernel")
    with notes.part("second"):
        notes.add(Finding("second", 2.0, "ms", at_most=3.0))
        first, second = read(tmp_path / "stage.json")  # on disk before the part has ended
    assert "first failed: RuntimeError: no such kernel" in first.name
    assert (first.holds, second.holds) == (False, True)


@pytest.mark.parametrize(
    ("finding", "holds"),
    [
        (Finding("fact", "words"), None),
        (Finding("figure", 1.0), None),
        (Finding("low enough", 1.0, at_most=1.0), True),
        (Finding("too high", 1.1, at_most=1.0), False),
        (Finding("high enough", 0.8, at_least=0.7), True),
        (Finding("too low", 0.6, at_least=0.7), False),
        (Finding("no number", float("nan"), at_most=1.0), False),
    ],
)
def test_a_bound_is_kept_or_missed_and_nan_misses_every_bound(finding: Finding, holds: bool | None) -> None:
    assert finding.holds is holds
    assert ("MISSED" in str(finding)) == (holds is False)


def _commands() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().decode(errors="replace"))
        except OSError:  # it ended while we looked
            continue
    return found
