"""What came of the cases: a line each, a table by blow, and one line of figures."""

from __future__ import annotations

import statistics
from collections import defaultdict

from tests.faults.kit.stage import Outcome

COLUMNS = ("recovered", "freed", "returned")


class Report:
    """Grows with every case, and is printed as it grows."""

    def __init__(self) -> None:
        self.freed: list[float] = []  # seconds, after callers that left
        self.passed_by: list[str] = []  # names of cases whose point no request came to
        self._outcomes: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        """One more case is done."""
        self._outcomes.append(outcome)
        figures = [f"{name} {value:6.3f} s" for name in COLUMNS if (value := getattr(outcome, name)) is not None]
        calls = "" if outcome.attempts is None else f"   calls {outcome.attempts}"
        print(f"{outcome.name:<56} {'   '.join(figures)}{calls}", flush=True)

    def skip(self, name: str) -> None:
        """The requests of a case never came to its point."""
        self.passed_by.append(name)
        print(f"{name:<56} passed by", flush=True)

    def show(self) -> dict[str, object]:
        """Print the table; answers the figures of the last line."""
        by_blow: dict[str, list[Outcome]] = defaultdict(list)
        for outcome in self._outcomes:
            by_blow[outcome.blow].append(outcome)
        print(f"\n{'blow':<18}{'cases':>6}" + "".join(f"{f'{name}, s: median':>22}{'most':>8}" for name in COLUMNS))
        for blow, outcomes in by_blow.items():
            line = f"{blow:<18}{len(outcomes):>6}"
            for name in COLUMNS:
                values = [value for each in outcomes if (value := getattr(each, name)) is not None]
                line += f"{statistics.median(values):>22.3f}{max(values):>8.3f}" if values else f"{'-':>22}{'-':>8}"
            print(line)
        figures: dict[str, object] = {"cases": len(self._outcomes), "left": len(self.freed)}
        if self.passed_by:
            figures["passed by"] = len(self.passed_by)
        if len(self.freed) > 1:
            p99 = statistics.quantiles(self.freed, n=100)[98]
            figures["cancel to free, p99 s"] = round(p99, 3)
            print(f"{len(self.freed)} callers left: all freed after {p99 * 1e3:.0f} ms at the 99th percentile")
        return figures
