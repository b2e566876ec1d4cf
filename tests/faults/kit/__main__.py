"""Strike a cluster at every message of a handoff, its disk and its Redis; by default one of the kit's own, else yours.

Prints a line a case, a table, and one line of JSON. Exit 0 when all held, 1 when something was wrong, 2 when misused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults.kit.disk import disk_cases
from tests.faults.kit.points import cases
from tests.faults.kit.redis import redis_cases
from tests.faults.kit.remote import NotAimedError, Remote, is_far
from tests.faults.kit.report import Report
from tests.faults.kit.theatre import AnyCase, Pass
from twostroke.errors import TwostrokeError


def told() -> argparse.Namespace:
    """What the kit was told."""
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--leaves", type=int, default=300, help="callers that leave at some moment, in each pass")
    parser.add_argument("--clusters", type=int, default=2, help="clusters of the kit's own side by side")
    parser.add_argument("--seed", type=int, default=1)
    yours = parser.add_argument_group(
        "your own cluster",
        "All but its router must run with --fault-points, and nobody else should use it. Nothing is killed or stopped.",
    )
    yours.add_argument("--router", metavar="HOST:PORT", help="gRPC door of its router, through which the rest is found")
    yours.add_argument("--api-key", help="who asks; better in TWOSTROKE_API_KEY, which no list of processes shows")
    yours.add_argument(
        "--tie",
        type=float,
        default=0.02,
        help="another token may come where the best was likelier than the second by at most this, in natural log",
    )
    return parser.parse_args()


async def in_yours(told: argparse.Namespace, chosen: Sequence[AnyCase], seed: int, report: Report) -> None:
    """Play in the cluster behind --router. Raises AssertionError, NotAimedError, TwostrokeError."""
    async with Remote.reached(told.router, told.api_key, told.tie, seed) as remote:
        for case in filter(is_far, chosen):
            try:
                outcome = await remote.play(case)
            except (AssertionError, TimeoutError) as error:
                raise AssertionError(f"{case.name}: {error!r}") from error
            if outcome is None:
                report.skip(case.name)
            else:
                report.add(outcome)
        for _ in range(told.leaves):
            report.freed.append(await remote.leave())


async def in_ours(told: argparse.Namespace, chosen: Sequence[AnyCase], seed: int, report: Report) -> None:
    """Play in clusters of the kit's own. Raises AssertionError."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            await Pass(chosen, told.leaves, seed, report).run(told.clusters, Path(folder))
        except BaseExceptionGroup as group:
            wrong, rest = group.split(AssertionError)
            if wrong is None or rest is not None:
                raise
            raise wrong.exceptions[0] from group


def main() -> int:
    """Run the kit; answers the exit code."""
    how = told()
    every: tuple[AnyCase, ...] = (*disk_cases(), *cases(), *redis_cases())
    chosen = [case for case in every if how.only in case.name and (not how.router or is_far(case))]
    if how.list:
        print(*(case.name for case in chosen), sep="\n")
        return 0
    play = in_yours if how.router else in_ours
    for number in range(how.passes):
        began, report = time.monotonic(), Report()
        try:
            asyncio.run(play(how, chosen, how.seed + number, report))
        except AssertionError as error:
            print(f"WRONG {error}", file=sys.stderr)
            return 1
        except (NotAimedError, TwostrokeError) as error:
            print(f"make faults: {error}", file=sys.stderr)
            return 2
        figures = report.show() | {"seconds": round(time.monotonic() - began)}
        print(json.dumps({"bench": "faults", "pass": number + 1, **figures}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
