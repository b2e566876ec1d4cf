"""What processes hold when nothing is under way: descriptors, memory, files in shared memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.soak.kills import Kills
from tests.support.processes import Processes, Service
from tests.support.settling import SETTLE_SECONDS

GROWTH = 1.05  # most that the memory of a process may become, relative to its baseline
SPARE_DESCRIPTORS = 2  # a connection that is being made anew


@dataclass(frozen=True)
class Held:
    """What one process holds.

    Attributes:
        descriptors: open files and sockets.
        memory: resident bytes, without the arena, which everybody who maps it would count.
    """

    descriptors: int
    memory: int


@dataclass
class Course:
    """One life of a process: what it held when it was warm, and what it holds now."""

    service: Service
    name: str
    base: Held
    now: Held
    checkpoints: int = 1

    @property
    def growth(self) -> float:
        """Of its memory, relative."""
        return self.now.memory / self.base.memory - 1

    def wrong(self) -> list[str]:
        """What has grown."""
        found = []
        if self.now.memory > GROWTH * self.base.memory:
            found.append(f"memory of {self.name} grew by {self.growth:.1%}")
        if self.now.descriptors > self.base.descriptors + SPARE_DESCRIPTORS:
            found.append(f"descriptors of {self.name}: {self.base.descriptors}, now {self.now.descriptors}")
        return found


@dataclass
class Holdings:
    """Follows all processes from checkpoint to checkpoint.

    Attributes:
        warm: requests until a life has its baseline.
        arenas: the folder of the arena.
    """

    whole: Processes
    kills: Kills
    warm: int
    arenas: Path
    courses: dict[tuple[str, int], Course] = field(default_factory=dict)
    shared: tuple[int, int] = (0, 0)  # files of the store in shared memory, and their bytes

    async def wrong(self, drawn: int) -> list[str]:
        """Wait until nothing is under way; answers what is held or has grown. Raises AssertionError, TimeoutError."""
        await self.whole.settled()
        await self._answered()
        self.whole.assert_calm()
        found = await asyncio.to_thread(self._wrong_files)
        for name, service in named(self.whole).items():
            held, key = await asyncio.to_thread(_held, service.pid), (name, service.lives)
            if key in self.courses:
                course = self.courses[key]
                course.now = held
                course.checkpoints += 1
                found += course.wrong()
            elif drawn - self.kills.born.get(service, 0) >= self.warm:
                self.courses[key] = Course(service, name, held, held)
        return found

    async def _answered(self) -> None:
        """Return once no router has a request open; a caller that left does not see it close."""
        async with asyncio.timeout(SETTLE_SECONDS):
            for client in self.whole.clients.values():
                while (await client.status()).open_requests:
                    await asyncio.sleep(0.01)

    def _wrong_files(self) -> list[str]:
        """One arena, always as large, and a lock for each who may write there; workers make theirs at the first use."""
        files = [path for path in self.arenas.iterdir() if path.name.startswith("twostroke-")]
        arenas = [path for path in files if path.suffix == ".arena"]
        before, self.shared = self.shared, (len(files), sum(path.stat().st_size for path in files))
        writers = 1 + len(self.whole.prefill) + len(self.whole.decode)
        if len(arenas) != 1 or len(files) > 1 + writers or before[1] not in (0, self.shared[1]):
            return [f"{self.shared[1]} bytes in shared memory: {sorted(path.name for path in files)}"]
        return []


def named(whole: Processes) -> dict[str, Service]:
    """All processes under names that tell them apart."""
    both = {f"{kind} {at}": each for kind in ("prefill", "decode") for at, each in enumerate(getattr(whole, kind))}
    return {"router": whole.router, "lone router": whole.lone, **both, "kvstore": whole.kvstore}


def _held(pid: int) -> Held:
    process = Path("/proc") / str(pid)
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    kib = {name: int(status[name].split()[0]) for name in ("VmRSS", "RssShmem")}
    return Held(sum(1 for _ in (process / "fd").iterdir()), (kib["VmRSS"] - kib["RssShmem"]) << 10)
