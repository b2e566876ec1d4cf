"""Other transfer engines beside ours: a source and a reader of each, asleep while somebody else is measured.

NIXL's source spins for work, so whoever else is measured meanwhile would be short of a core. `make peers` sets them up.
"""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers import MOONCAKE_LIBRARIES, MOONCAKE_PYTHON, NIXL_PYTHON
from bench.processes import DidNotServe
from bench.store.ground import BLOCKS, NotMoved

SCRIPT = Path(__file__).with_name("rival.py")
ANSWER_SECONDS = 60.0
MOST_BYTES = 1 << 20  # of a line
# Segments of UCX's TCP: the 8 KiB of its own choice make it several times slower. Sleepers must not lose their peers.
_UCX = {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k", "UCX_KEEPALIVE_INTERVAL": "inf"}


@dataclass(frozen=True, slots=True)
class Engine:
    """One to measure, and how its processes are started."""

    name: str
    python: Path
    environ: Mapping[str, str] = field(default_factory=dict)


NIXL = Engine("nixl", NIXL_PYTHON, {**_UCX, "UCX_TLS": "tcp,self"})
NIXL_NEAR = Engine("nixl", NIXL_PYTHON, _UCX)  # what it chooses on one host: the kernel copies between processes
MOONCAKE = Engine(
    "mooncake", MOONCAKE_PYTHON, {"LD_LIBRARY_PATH": ":".join(map(str, MOONCAKE_LIBRARIES)), "GLOG_minloglevel": "2"}
)


class Rival:
    """A source and a reader that are awake inside `get` alone."""

    def __init__(self, source: Process, reader: Process) -> None:
        self._processes = (source, reader)

    async def get(self, span: range) -> float:
        """Read pages; answers the reader's own seconds."""
        return await self._ask(f"{span.start} {len(span)}")

    async def check(self, who: str) -> None:
        """Raise NotMoved unless it brings every byte."""
        await self.get(range(BLOCKS))
        if await self._ask("check") != BLOCKS:
            raise NotMoved(f"{who} brings other bytes")

    def sleep(self) -> None:
        """Take no part."""
        self._signal(signal.SIGSTOP)

    def kill_reader(self) -> None:
        """End the reader at once."""
        self._processes[1].kill()

    async def source_gone(self, seconds: float) -> bool:
        """Whether the source, awake, ends within a time."""
        self._processes[0].send_signal(signal.SIGCONT)
        waiting = asyncio.create_task(self._processes[0].wait())
        await asyncio.wait({waiting}, timeout=seconds)
        gone = waiting.done()
        waiting.cancel()
        return gone

    async def _ask(self, line: str) -> float:
        self._signal(signal.SIGCONT)
        try:
            (answer,) = await _told(self._processes[1], line)
            return float(answer)
        finally:
            self.sleep()

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.send_signal(number)


@asynccontextmanager
async def awake(engine: Engine) -> AsyncIterator[Rival]:
    """Run a source and a reader inside the block. Raises DidNotServe, when one cannot."""
    if not engine.python.is_file():
        raise DidNotServe("make peers has not set it up")
    async with _running(engine, "source") as (source, told), _running(engine, "reader", *told) as (reader, _):
        yield Rival(source, reader)


@asynccontextmanager
async def _running(engine: Engine, role: str, *told: str) -> AsyncIterator[tuple[Process, list[str]]]:
    command = [str(engine.python), str(SCRIPT), role, engine.name, *told]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=asyncio.subprocess.DEVNULL, limit=MOST_BYTES,
        env={**os.environ, **engine.environ},
    )  # fmt: skip
    try:
        yield process, await _told(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _told(process: Process, line: str | None = None) -> list[str]:
    """The words of its next answer; engines print whatever else they like."""
    if process.stdin is None or process.stdout is None:
        raise DidNotServe("it has no pipes")
    if line is not None:
        process.stdin.write(f"{line}\n".encode())
    async with asyncio.timeout(ANSWER_SECONDS):
        while answer := await process.stdout.readline():
            words = answer.decode(errors="replace").split()
            if words[:1] == ["TOLD"]:
                return words[1:]
    raise DidNotServe(f"it ended with status {await process.wait()}")
