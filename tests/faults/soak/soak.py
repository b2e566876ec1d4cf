"""The run: stretches of requests with kills among them, and a checkpoint after each, with nothing under way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, repeat

from tests.faults.soak.bills import Bills
from tests.faults.soak.callers import SHOWN, Callers
from tests.faults.soak.holdings import Holdings
from tests.faults.soak.kills import Kills
from tests.faults.soak.mix import Mix

TELLS = 8  # progress lines a stretch


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is asked.

    Attributes:
        requests: in all.
        stretch: requests between checkpoints; what a process holds after the first is its baseline.
        at_once: callers.
        kill_every: requests between kills.
        seed: of everything drawn.
    """

    requests: int = 20_000
    stretch: int = 2_000
    at_once: int = 24
    kill_every: int = 200
    seed: int = 1


@dataclass
class Soak:
    """A run under way."""

    plan: Plan
    callers: Callers
    kills: Kills
    holdings: Holdings
    bills: Bills
    drawn: int = 0
    wrong: list[str] = field(default_factory=list)  # found at checkpoints
    _began: float = field(default_factory=time.monotonic)

    async def run(self) -> None:
        """Play the plan, up to the first checkpoint at which something is wrong."""
        mix = Mix(self.plan.seed)
        while self.drawn < self.plan.requests and not self.failed:
            try:
                await self._stretch(mix, min(self.plan.stretch, self.plan.requests - self.drawn))
            except* (AssertionError, TimeoutError) as group:  # who was killed did not come back
                self.wrong += map(repr, group.exceptions)
            else:
                await self._checkpoint()

    @property
    def failed(self) -> bool:
        """Whether something was wrong."""
        return bool(self.wrong or self.callers.wrong)

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._began

    async def _stretch(self, mix: Mix, count: int) -> None:
        tickets = islice(repeat(mix), count)
        async with asyncio.TaskGroup() as tasks:
            for number in range(min(self.plan.at_once, count)):
                tasks.create_task(self._caller(tickets, tasks), name=f"caller {number}")

    async def _caller(self, tickets: Iterator[Mix], tasks: asyncio.TaskGroup) -> None:
        for mix in tickets:
            request = mix.draw()
            self.drawn += 1
            if self.drawn % self.plan.kill_every == 0:
                late = self.drawn > self.plan.requests / 2
                tasks.create_task(self.kills.strike(self.drawn, late=late), name="kill")
            await self.callers.play(request)
            if self.drawn % max(1, self.plan.stretch // TELLS) == 0:
                self._tell()

    async def _checkpoint(self) -> None:
        try:
            found = await self.holdings.wrong(self.drawn)
        except (AssertionError, TimeoutError) as error:
            found = [repr(error)]
        seen, self.callers.seen = self.callers.seen, {}
        found += await asyncio.to_thread(self.bills.wrong, seen)
        self.wrong += found[:SHOWN]
        print(f"checkpoint at {self.drawn:,}: {'; '.join(found[:SHOWN]) or 'all is well'}", flush=True)

    def _tell(self) -> None:
        outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in self.callers.outcomes.most_common())
        print(
            f"{self.drawn:>7,} asked   {self.drawn / self.seconds:5.1f}/s   {outcomes};"
            f" {self.kills.struck.total()} killed",
            flush=True,
        )
