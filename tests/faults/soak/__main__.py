"""`make soak`: a long run of every kind of request with kills among them; prints a table and one JSON line."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.figures import emit, report
from services.kvstore.arena import default_directory
from tests.faults.soak.bills import Bills
from tests.faults.soak.callers import Callers
from tests.faults.soak.holdings import GROWTH, Holdings
from tests.faults.soak.kills import Kills
from tests.faults.soak.soak import Plan, Soak
from tests.faults.soak.truth import Truth
from tests.support.alone import Alone
from tests.support.cluster import tiny_model
from tests.support.processes import running

QUICK = Plan(requests=1_000, stretch=250, at_once=16, kill_every=100)
# All in f32, so that the shape of a batch changes no token; what is bounded is full by the first checkpoint.
WORKER = (
    *("--weights", "f32", "--threads", "1", "--tokens-per-step", "64", "--max-running", "32", "--lease-seconds", "1"),
    *("--kv-bytes", "8MiB"),
)
ROUTER = ("--index-keys", "4096")
STORE = ("--arena-bytes", str(8 << 20))


async def soaked(plan: Plan, folder: Path, arenas: Path) -> Soak:
    """The run, when it is over."""
    model, soak = tiny_model(folder / "model"), None
    store = (*STORE, "--arena-directory", str(arenas))
    try:
        async with (
            Alone.started(model) as alone,
            running(folder, model, *WORKER, router=ROUTER, store=store) as whole,
        ):
            kills = Kills(whole, plan.seed)
            callers, holdings = Callers(whole, Truth(alone)), Holdings(whole, kills, plan.stretch, arenas)
            soak = Soak(plan, callers, kills, holdings, Bills(whole.ledger))
            await soak.run()
    except AssertionError as error:  # somebody did not end well
        if soak is None:
            raise
        soak.wrong.append(f"at the end: {error!r}")
    return soak


def show(soak: Soak) -> dict[str, Any]:
    """A table of what processes held, and the figures of the last line."""
    print(f"\n{'process':<14}{'life':>5}{'checkpoints':>12}{'descriptors':>20}{'memory, MB':>22}{'growth':>9}")
    for (name, life), course in soak.holdings.courses.items():
        base, now = course.base, course.now
        print(
            f"{name:<14}{life:>5}{course.checkpoints:>12}{base.descriptors:>11} to {now.descriptors:>5}"
            f"{base.memory / 1e6:>13.1f} to {now.memory / 1e6:>5.1f}{course.growth:>9.1%}"
        )
    files, size = soak.holdings.shared
    print(f"{files} files of {size / 1e6:.1f} MB in shared memory; {soak.bills.records:,} records in the usage log")
    for line in (*soak.callers.wrong, *soak.wrong):
        print(f"WRONG {line}")
    return {
        "requests": soak.drawn,
        "seconds": round(soak.seconds),
        "outcomes": dict(soak.callers.outcomes),
        "killed": dict(soak.kills.struck),
        "records": soak.bills.records,
        "shared_files": files,
        "shared_bytes": size,
        "growth_allowed": round(GROWTH - 1, 2),
        "held": {
            f"{name}, life {life}": {
                "checkpoints": course.checkpoints,
                "descriptors": [course.base.descriptors, course.now.descriptors],
                "memory_mb": [round(each.memory / 1e6, 1) for each in (course.base, course.now)],
            }
            for (name, life), course in soak.holdings.courses.items()
        },
        "wrong": len(soak.wrong) + sum(soak.callers.outcomes[each] for each in ("wrong", "failed")),
    }


def main() -> int:
    """Run it; answers the exit code."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=Plan.requests)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK.requests:,} requests, in about two minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="file to write the result to")
    told = parser.parse_args()
    plan = replace(QUICK if told.quick else Plan(requests=told.requests), seed=told.seed)
    shared = default_directory()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=shared) as arenas:
        soak = asyncio.run(soaked(plan, Path(folder), Path(arenas)))
    emit(report("soak", {}, **show(soak)), told.out)
    return 1 if soak.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
