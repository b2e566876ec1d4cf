"""What a stage found, written to its file one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Finding:
    """A figure, or a fact in words.

    Attributes:
        name: what was looked at.
        value: what was found.
        unit: of a figure.
        at_most: a correct, or fast enough, value is no larger; None for no such bound.
        at_least: likewise, no smaller.
    """

    name: str
    value: float | str
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the bound is kept; None without one. A NaN keeps none."""
        if isinstance(self.value, str) or (self.at_most is None and self.at_least is None):
            return None
        return (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )

    def __str__(self) -> str:
        value = self.value if isinstance(self.value, str) else f"{self.value:.4g}"
        bound = "" if self.at_most is None else f"≤ {self.at_most:g}"
        bound = bound if self.at_least is None else f"≥ {self.at_least:g}"
        verdict = {None: "", True: "", False: "  MISSED"}[self.holds]
        return f"{self.name:58}{value:>14} {self.unit:8}{bound:>10}{verdict}".rstrip()


class Notes:
    """A stage's findings; the file at `path` always holds all of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: list[Finding] = []

    def add(self, finding: Finding) -> None:
        """Print a finding and keep it."""
        self._found.append(finding)
        print(finding, flush=True)
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps([asdict(each) for each in self._found], indent=1))
        temporary.replace(self._path)

    def fact(self, name: str, value: object) -> None:
        """Keep something in words."""
        self.add(Finding(name, str(value)))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Go on behind a part that fails: its error is a finding, and misses its bound."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - device time is scarce: the other parts still count
            self.add(Finding(f"{name} failed: {type(error).__name__}: {str(error)[:300]}", 1.0, "", at_most=0.0))


def read(path: Path) -> Sequence[Finding]:
    """Read what a stage left; nothing when it left nothing."""
    return [Finding(**each) for each in json.loads(path.read_text())] if path.exists() else []
