"""A real `twostroke up` in a process of its own, read line by line."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.tiny import write_tiny
from tests.support.tiny_tokenizer import write_tiny_tokenizer

ROOT = Path(__file__).parents[2]
START_SECONDS = 60.0
STOP_SECONDS = 60.0


def tiny_model(folder: Path) -> Path:
    """Write a model of a few kilobytes, tokenizer and all."""
    write_tiny(folder)
    write_tiny_tokenizer(folder)
    return folder


@dataclass(slots=True)
class Launched:
    """A running launcher."""

    process: Process
    arena: Path
    lines: list[str] = field(default_factory=list)

    async def until(self, words: str) -> str:
        """The next line that holds these words; fails with all lines when the output ends before."""
        if self.process.stdout is None:
            raise RuntimeError("the output is not ours to read")
        async with asyncio.timeout(START_SECONDS):
            while raw := await self.process.stdout.readline():
                self.lines.append(raw.decode().rstrip())
                if words in self.lines[-1]:
                    return self.lines[-1]
        raise AssertionError(f"ended without {words!r}:\n" + "\n".join(self.lines))

    async def ready(self) -> str:
        """Wait for the ready line; returns the address of the HTTP door."""
        return (await self.until("ready http://")).split()[1]

    async def ended(self) -> int:
        """Read what is left and wait for the end; returns the status."""
        async with asyncio.timeout(STOP_SECONDS):
            output, _ = await self.process.communicate()
        self.lines += output.decode().splitlines()
        if self.process.returncode is None:
            raise RuntimeError("communicate returns at the end")
        return self.process.returncode

    def children(self) -> dict[str, int]:
        """Process ids by name of service, of the children that live."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            command, parent = _command(folder), _parent(folder)
            if parent == self.process.pid and command[1:2] == ["-m"]:
                found[command[2]] = int(folder.name)
        return found

    def arenas(self) -> list[Path]:
        """Files in the arena's folder."""
        return sorted(self.arena.iterdir())


@asynccontextmanager
async def launched(folder: Path, *arguments: str, environ: Mapping[str, str] | None = None) -> AsyncIterator[Launched]:
    """Run `twostroke up` with a tiny model and everything else below `folder`; nothing of it outlives the block."""
    arena = folder / "arena"
    arena.mkdir(exist_ok=True)
    told = [
        *("--model", str(tiny_model(folder / "tiny"))),
        *("--port", "0", "--arena-bytes", "4MiB", "--kv-bytes", "4MiB"),
        *("--arena-directory", str(arena), "--state-directory", str(folder / "state")),
        *("--weights-cache", str(folder / "cache")),
    ]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "twostroke", "up", *told, *arguments),
        stdout=PIPE,
        stderr=STDOUT,
        cwd=ROOT,
        env={**os.environ, **(environ or {})},
        start_new_session=True,
    )
    running = Launched(process, arena)
    try:
        yield running
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await running.ended()


async def gone(pid: int) -> None:
    """Return when the process has ended, whoever its parent is."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop.add_reader(descriptor, ended.set)
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def taken_port() -> socket.socket:
    """A socket that listens on loopback; close it to give the port back."""
    return socket.create_server(("127.0.0.1", 0))


def _command(process: Path) -> list[str]:
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def _parent(process: Path) -> int | None:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None
