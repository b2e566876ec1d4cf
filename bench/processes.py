"""A server in processes of its own: started, watched for the memory it takes, and ended with all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from bench.quiet import Quiet

T = TypeVar("T")

STOP_SECONDS = 20.0
LINGER_SECONDS = 1.0  # of descendants: some remove what the server shared, once it has ended
LOOK_SECONDS = 1.0  # between two looks at memory
LAST_BYTES = 3_000  # of the log, told when a server fails


class DidNotServe(Exception):
    """A server ended, or took too long; the message holds the end of its log."""


@dataclass(slots=True)
class Spawned:
    """A running process and its descendants."""

    process: asyncio.subprocess.Process
    log: IO[bytes]
    began: float  # time.perf_counter at its start
    quiet: Quiet
    peak_bytes: int = 0

    def require_alive(self) -> None:
        """Raise DidNotServe if it has ended."""
        if self.process.returncode is not None:
            raise self.failed(f"ended with status {self.process.returncode}")

    def failed(self, how: str) -> DidNotServe:
        """An error that holds the last lines of the log."""
        self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - LAST_BYTES))
        return DidNotServe(f"{how}\n{self.log.read().decode(errors='replace')}")

    def others_cores(self) -> float:
        """Cores that worked for others since its start."""
        return self.quiet.others_cores(tree(self.process.pid))

    async def watch_memory(self) -> None:
        """Keep `peak_bytes` up to date until cancelled."""
        while True:
            self.peak_bytes = max(self.peak_bytes, await asyncio.to_thread(_tree_bytes, self.process.pid))
            await asyncio.sleep(LOOK_SECONDS)


@asynccontextmanager
async def spawned(command: Sequence[str], environ: Mapping[str, str]) -> AsyncIterator[Spawned]:
    """Run a command for the length of the block, in a session of its own; what is left of it then is killed."""
    with tempfile.TemporaryFile() as log:
        quiet, began = Quiet(), time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **environ},
            start_new_session=True,  # our Ctrl-C reaches us alone, and we end it
        )
        watching: asyncio.Task[None] | None = None
        try:
            running = Spawned(process, log, began, quiet)
            watching = asyncio.create_task(running.watch_memory())
            yield running
        finally:
            if watching is not None:
                watching.cancel()
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask it to end, wait for it and a moment for its descendants, and kill what is left."""
    with ExitStack() as open_files:
        descendants = [each for pid in tree(process.pid)[1:] for each in _pidfd(pid, open_files)]
        try:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await process.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    for descendant in descendants:
                        await _ended(descendant)
        finally:
            if process.returncode is None:
                process.kill()
            for descendant in descendants:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descendant, signal.SIGKILL)
            await process.wait()


def _pidfd(pid: int, open_files: ExitStack) -> list[int]:
    """A descriptor of the very process that has this id now, or nothing if it has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return []
    open_files.callback(os.close, descriptor)
    return [descriptor]


async def _ended(descriptor: int) -> None:
    """Wait until the process of a descriptor has ended."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a benchmark as `asyncio.run` does, but let Ctrl-C and SIGTERM unwind it, so that its servers end either way.

    Both only cancel, however often they come: an exception in the middle of an ending would leave a server behind.

    Raises:
        SystemExit: it was interrupted.
    """

    async def unwinding() -> T:
        if (task := asyncio.current_task()) is not None:
            for stop in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(stop, task.cancel)
        return await work

    try:
        return asyncio.run(unwinding())
    except asyncio.CancelledError:
        raise SystemExit("interrupted; all servers were ended") from None


def free_port() -> int:
    """A port of loopback that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def tree(root: int) -> list[int]:
    """A process and its descendants that live."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended while we looked
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found = [root]
    for pid in found:
        found += children.get(pid, ())
    return found


def _tree_bytes(root: int) -> int:
    """Proportional set size of a process tree: a page that several map is counted once."""
    kilobytes = 0
    for pid in tree(root):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    kilobytes += int(line.split()[1])
    return kilobytes * 1024
