"""What was measured, and what is said about it: medians of rounds, ratios with their aims, one line of JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure and what it should be."""

    value: float
    aim: float
    better: Literal["higher", "lower"]

    @property
    def met(self) -> bool:
        """Whether the aim is reached."""
        return self.value >= self.aim if self.better == "higher" else self.value <= self.aim


@dataclass(frozen=True, slots=True)
class Figures:
    """Every round's figure, by who was measured and what."""

    _rounds: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, who: str, figures: Mapping[str, float]) -> None:
        """Take what one round brought."""
        for what, value in figures.items():
            self._rounds[who, what].append(value)

    def median(self, who: str, what: str) -> float | None:
        """Over the rounds; None where it was not measured."""
        rounds = self._rounds.get((who, what))
        return statistics.median(rounds) if rounds else None

    def best(self, names: Sequence[str], what: str) -> float | None:
        """The highest median among some; None where none of them was measured."""
        return max((value for who in names if (value := self.median(who, what)) is not None), default=None)

    def print_medians(
        self, names: Sequence[str], wanted: Sequence[str], notes: Mapping[str, str] | None = None
    ) -> None:
        """A table: a line a figure, a column a name, and what is to be noted beside a line."""
        print(f"{'medians':30}" + "".join(f"{who:>17}" for who in names))
        for what in wanted:
            values = [self.median(who, what) for who in names]
            cells = "".join(f"{'-':>17}" if value is None else f"{value:17.1f}" for value in values)
            print(f"{what:30}{cells}   {(notes or {}).get(what, '')}".rstrip())

    def raw(self) -> dict[str, dict[str, list[float]]]:
        """All rounds, by name and figure."""
        told: dict[str, dict[str, list[float]]] = {}
        for (who, what), rounds in self._rounds.items():
            told.setdefault(who, {})[what] = [round(value, 4) for value in rounds]
        return told


def processor() -> str:
    """What the kernel calls this processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def report(bench: str, ratios: Mapping[str, Ratio], **more: Any) -> dict[str, Any]:
    """The ratios, and what they were measured with, ready for JSON."""
    return {
        "bench": bench,
        "machine": {"cores": os.cpu_count(), "processor": processor()},
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        **more,
        "ratios": {
            name: {"value": round(ratio.value, 3), "aim": ratio.aim, "better": ratio.better}
            for name, ratio in ratios.items()
        },
    }


def print_ratios(ratios: Mapping[str, Ratio]) -> None:
    """A table of them."""
    print(f"\n{'ratio':44}{'value':>10}{'aim':>9}")
    for name, ratio in ratios.items():
        aim = f"{'≥' if ratio.better == 'higher' else '≤'} {ratio.aim:g}"
        print(f"{name:44}{ratio.value:>10.2f}{aim:>9}  {'' if ratio.met else 'not met'}".rstrip())


def write(path: Path, told: Mapping[str, Any]) -> None:
    """Write a report; whoever reads meanwhile, or cuts this off, finds a whole one."""
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps(told, indent=1) + "\n")
    beside.replace(path)


def emit(told: Mapping[str, Any], out: Path | None, more: Mapping[str, Any] | None = None) -> None:
    """Print a report as the last line; write it, with what is too long for a line, to `out` if that is given."""
    print(json.dumps(told), flush=True)
    if out is not None:
        write(out, {**told, **(more or {})})
