"""Clusters of the kit's own, side by side, in which all cases are played once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol, Self, TypeVar

from tests.faults.kit.disk import DiskCase
from tests.faults.kit.disk_scene import DISK, DiskScene
from tests.faults.kit.hosts import Hosts
from tests.faults.kit.points import Case
from tests.faults.kit.redis import RedisCase
from tests.faults.kit.redis_scene import RedisScene
from tests.faults.kit.report import Report
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


AnyCase = Case | DiskCase | RedisCase


Played = TypeVar("Played", bound=AnyCase, contravariant=True)


class Plays(Protocol[Played]):
    """A cluster for one kind of case."""

    async def play(self, case: Played) -> Outcome:
        """Play a case. Raises AssertionError, when something is wrong."""


class Theatre:
    """A cluster on one host, for handoffs and the disk."""

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


@asynccontextmanager
async def two_hosts(folder: Path, seed: int) -> AsyncIterator[RedisScene]:
    """A cluster on two hosts, for the directory."""
    model = tiny_model(folder / "model", layers=4)
    async with Alone.started(model) as alone, Hosts.started(folder, model, *WORKER) as hosts:
        yield RedisScene(hosts, alone, seed)


class Pass:
    """All cases once, by several clusters side by side. The first thing that is wrong ends it."""

    def __init__(self, chosen: Sequence[AnyCase], leaves: int, seed: int, report: Report) -> None:
        self._cases = [case for case in reversed(chosen) if not isinstance(case, RedisCase)]
        self._redis_cases = [case for case in reversed(chosen) if isinstance(case, RedisCase)]
        self._leaves = leaves
        self._seed = seed
        self._report = report

    async def run(self, clusters: int, folder: Path) -> None:
        """Play. Raises AssertionError, naming the case."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(clusters):
                tasks.create_task(self._player(self._seed * 100 + number, folder / str(number)))

    async def _player(self, seed: int, folder: Path) -> None:
        one, two = folder / "one", folder / "two"
        for each in (folder, one, two):
            await asyncio.to_thread(each.mkdir)
        if self._cases or self._leaves:
            async with Theatre.opened(one, seed) as theatre:
                while self._cases:
                    await self._play(theatre, self._cases.pop())
                while len(self._report.freed) < self._leaves:
                    self._report.freed.append(await theatre.handoff.leave())
        if self._redis_cases:
            async with two_hosts(two, seed) as scene:
                while self._redis_cases:
                    await self._play(scene, self._redis_cases.pop())

    async def _play(self, stage: Plays[Played], case: Played) -> None:
        try:
            self._report.add(await stage.play(case))
        except (AssertionError, TimeoutError) as error:
            raise AssertionError(f"{case.name}: {error!r}") from error
