"""`make faults`: every case of the kit in real processes, then callers that leave; prints a table and one JSON line."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from tests.faults.kit.disk import DiskCase, disk_cases
from tests.faults.kit.disk_scene import DISK, DiskScene
from tests.faults.kit.points import Case, cases
from tests.faults.kit.scene import Scene
from tests.faults.kit.stage import Outcome
from tests.support.alone import Alone
from tests.support.cluster import tiny_model
from tests.support.processes import running

# Short steps, so that a prompt has many messages; short waits, so that a case takes seconds.
WORKER = ("--weights", "f32", "--tokens-per-step", "32", "--max-running", "16", "--lease-seconds", "1")
ROUTER = ("--worker-silence-seconds", "1")
EVERY = ("--fault-points",)
DISK_BYTES = 128 << 20  # more than all cases write: no block has to leave for another


class Theatre:
    """A cluster of its own, in which every kind of case is played."""

    def __init__(self, handoff: Scene, disk: DiskScene) -> None:
        self.handoff = handoff
        self.disk = disk

    @classmethod
    @asynccontextmanager
    async def opened(cls, folder: Path, seed: int) -> AsyncIterator[Self]:
        """Run it inside the block."""
        model = tiny_model(folder / "model", layers=4)
        disk = (*DISK, "--disk-directory", str(folder / "disk"), "--disk-bytes", str(DISK_BYTES))
        async with (
            Alone.started(model) as alone,
            running(folder, model, *WORKER, every=EVERY, router=ROUTER, store=disk, far=True) as whole,
        ):
            yield cls(Scene(whole, alone, seed), DiskScene(whole, alone, seed))

    async def play(self, case: Case | DiskCase) -> Outcome:
        """Play a case. Raises AssertionError, when something is wrong."""
        return await (self.disk.play(case) if isinstance(case, DiskCase) else self.handoff.play(case))


class Pass:
    """All cases once, by several clusters side by side. The first thing that is wrong ends it."""

    def __init__(self, chosen: Sequence[Case | DiskCase], leaves: int, seed: int) -> None:
        self._cases = list(reversed(chosen))
        self._leaves = leaves
        self._seed = seed
        self.outcomes: list[Outcome] = []
        self.freed: list[float] = []  # after callers that left

    async def run(self, clusters: int, folder: Path) -> None:
        """Play. Raises AssertionError, naming the case."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(clusters):
                tasks.create_task(self._player(number, folder / str(number)))

    async def _player(self, number: int, folder: Path) -> None:
        await asyncio.to_thread(folder.mkdir)
        async with Theatre.opened(folder, self._seed * 100 + number) as theatre:
            while self._cases:
                await self._play(theatre, self._cases.pop())
            while len(self.freed) < self._leaves:
                self.freed.append(await theatre.handoff.leave())

    async def _play(self, theatre: Theatre, case: Case | DiskCase) -> None:
        try:
            outcome = await theatre.play(case)
        except (AssertionError, TimeoutError) as error:
            raise AssertionError(f"{case.name}: {error!r}") from error
        self.outcomes.append(outcome)
        returned = "" if outcome.returned is None else f"   returned {outcome.returned:6.2f} s"
        print(
            f"{case.name:<56} recovered {outcome.recovered:6.2f} s   freed {outcome.freed:6.3f} s"
            f"   calls {outcome.attempts}{returned}",
            flush=True,
        )


def show(done: Pass) -> dict[str, object]:
    """A table by blow, and the figures of the last line."""
    by_blow: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in done.outcomes:
        by_blow[outcome.blow].append(outcome)
    print(f"\n{'blow':<14}{'cases':>6}{'recovered, s: median':>22}{'most':>8}{'freed, s: median':>18}{'most':>8}")
    for blow, outcomes in by_blow.items():
        recovered, freed = ([getattr(each, what) for each in outcomes] for what in ("recovered", "freed"))
        print(
            f"{blow:<14}{len(outcomes):>6}{statistics.median(recovered):>22.2f}{max(recovered):>8.2f}"
            f"{statistics.median(freed):>18.3f}{max(freed):>8.3f}"
        )
    figures: dict[str, object] = {"cases": len(done.outcomes), "left": len(done.freed)}
    if len(done.freed) > 1:
        p99 = statistics.quantiles(done.freed, n=100)[98]
        figures["cancel to free, p99 s"] = round(p99, 3)
        print(f"{len(done.freed)} callers left: all freed after {p99 * 1e3:.0f} ms at the 99th percentile")
    return figures


def main() -> int:
    """Run the kit; answers the exit code."""
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--leaves", type=int, default=300, help="callers that leave at some moment, in each pass")
    parser.add_argument("--clusters", type=int, default=2, help="clusters side by side")
    parser.add_argument("--seed", type=int, default=1)
    told = parser.parse_args()
    every: tuple[Case | DiskCase, ...] = (*disk_cases(), *cases())
    chosen = [case for case in every if told.only in case.name]
    for number in range(told.passes):
        began, done = time.monotonic(), Pass(chosen, told.leaves, told.seed + number)
        with tempfile.TemporaryDirectory() as folder:
            try:
                asyncio.run(done.run(told.clusters, Path(folder)))
            except BaseExceptionGroup as group:
                wrong, rest = group.split(AssertionError)
                if wrong is None or rest is not None:
                    raise
                print(f"WRONG {wrong.exceptions[0]}", file=sys.stderr)
                return 1
        figures = show(done) | {"seconds": round(time.monotonic() - began)}
        print(json.dumps({"bench": "faults", "pass": number + 1, **figures}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
