"""A run's figures as they come: told at once and written at once, so that a run that is cut leaves what it measured."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.client import BadAnswer
from bench.contenders import Contender, part_of_name
from bench.figures import Figures, Ratio, emit, print_ratios, report, write
from bench.loads import others_cores
from bench.processes import DidNotServe

Measured = tuple[str, float]  # the figure's name, and its value


@dataclass(slots=True)
class Record:
    """What a run has measured by now.

    Attributes:
        bench: its name.
        backend: that our engine takes on this machine; without a compiler it is a slower one.
        out: a file to write after every figure, whole each time; None for none.
        conclude: the ratios that follow from figures; one that lacks a side is not among them.
        figures: every round's.
        left_out: who was not measured, or not to the end, and why.
    """

    bench: str
    backend: str
    out: Path | None
    conclude: Callable[[Figures], Mapping[str, Ratio]]
    figures: Figures = field(default_factory=Figures)
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, who: str, what: str, value: float) -> None:
        """Take a figure."""
        print(f"  {what}: {value:,.1f}", flush=True)
        self.figures.add(who, {what: value})
        self._write()

    def add_all(self, who: str, measured: Mapping[str, float]) -> None:
        """Take several that were told before."""
        self.figures.add(who, measured)
        self._write()

    def leave_out(self, who: str, why: str) -> None:
        """Note who is not measured, or not further."""
        if self.left_out.get(who) != why:
            print(f"{who} is left out, with the ratios that need it: {why}", flush=True)
        self.left_out[who] = why

    async def take(
        self, contender: Contender, measuring: AsyncGenerator[Measured, None], deadline: float | None
    ) -> None:
        """Take all figures of a visit. What goes wrong is noted; the figures before that stay.

        Args:
            contender: who is visited.
            measuring: the visit, not yet begun.
            deadline: on time.monotonic; a visit that does not fit is not begun, one that takes too long is cut.
        """
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left < contender.least_seconds:
            self.leave_out(contender.name, "it does not fit into the time of this run")
            return
        try:
            async with asyncio.timeout(left), aclosing(measuring):
                async for what, value in measuring:
                    self.add(contender.name, what, value)
        except* (DidNotServe, BadAnswer, aiohttp.ClientError) as failed:
            self.leave_out(contender.name, f"not measured to the end: {failed.exceptions[0]}")
        except* TimeoutError:
            self.leave_out(contender.name, "not measured to the end: the time of this run is over")

    def finish(self) -> None:
        """Print the ratios, and the report as one line of JSON, and write it."""
        print_ratios(self.conclude(self.figures))
        emit(self._report(), self.out, self._rounds(complete=True))

    def _report(self) -> dict[str, Any]:
        more = {
            "backend": self.backend,
            "left_out": self.left_out,
            "others_cores": round(others_cores(self.figures), 2),
        }
        return report(self.bench, self.conclude(self.figures), **more)

    def _rounds(self, *, complete: bool) -> dict[str, Any]:
        return {"complete": complete, "rounds": self.figures.raw()}

    def _write(self) -> None:
        if self.out is not None:
            write(self.out, self._report() | self._rounds(complete=False))


def add_shared(parser: argparse.ArgumentParser) -> None:
    """What every comparison can be told: whom to measure, and where to write."""
    parser.add_argument(
        "--only",
        nargs="+",
        type=part_of_name,
        default=(),
        metavar="WORD",
        help="measure only those whose name holds one of these words, as `--only int8 vllm Q4_1`",
    )
    parser.add_argument("--out", type=Path, help="file to write the result to, with every round, after each figure")
