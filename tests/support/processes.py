"""Services in processes of their own, to be killed, stopped and started again on the same port."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.settling import settled
from twostroke.client import Client

ROOT = Path(__file__).parents[2]
START_SECONDS = 60.0
STOP_SECONDS = 30.0


@dataclass(frozen=True)
class Place:
    """Where processes run."""

    address: str = "127.0.0.1"  # at which they are reached
    enter: tuple[str, ...] = ()  # what their command begins with


HERE = Place()


class Service:
    """`python -m services.NAME`, told the same in all its lives."""

    def __init__(self, name: str, *told: str, at: Place = HERE) -> None:
        self.name = name
        self.address = f"{at.address}:0"  # the port of the first life is kept
        self._enter = at.enter
        self._told = told
        self.lives = 0
        self._process: Process | None = None
        self._lines: deque[str] = deque(maxlen=200)
        self._loud: deque[str] = deque(maxlen=20)
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start it, and wait until it serves; a router, until it is ready."""
        told = ("--listen", self.address, "--drain-seconds", "20", "--stop-with-stdin", *self._told)
        command = (*self._enter, sys.executable, "-m", f"services.{self.name}", *told)
        self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=STDOUT, cwd=ROOT)
        self.lives += 1
        self.address = (await self._until("serving"))["address"]
        if self.name == "router":
            await self._until("ready")
        self._reading = asyncio.create_task(self._read(), name=f"output of {self.name}")

    async def kill(self) -> None:
        """End it at once, as the kernel does when memory runs out."""
        self._alive.kill()
        await self.ended()

    def freeze(self) -> None:
        """Stop it in its tracks, as a stuck process is: alive, connected, silent."""
        self._alive.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._alive.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Ask it to drain."""
        self._alive.send_signal(signal.SIGTERM)

    def close_stdin(self) -> None:
        """Let it believe that its launcher is gone."""
        assert self._alive.stdin is not None
        self._alive.stdin.close()

    async def ended(self) -> int:
        """Its status, once it has ended."""
        async with asyncio.timeout(STOP_SECONDS):
            status = await self._alive.wait()
            if self._reading is not None:
                await self._reading
        self._process = self._reading = None
        return status

    async def clear(self) -> None:
        """Leave nothing behind, whatever happened."""
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self.ended()

    @property
    def lines(self) -> list[str]:
        """The last lines it logged, in all its lives."""
        return list(self._lines)

    def forget_lines(self) -> None:
        """Begin the lines anew."""
        self._lines.clear()
        self._loud.clear()

    def assert_calm(self) -> None:
        """It lives, and logged no defect in any of its lives."""
        assert self.runs, f"{self.name} has ended"
        assert not self._loud, f"{self.name} logged a defect:\n" + "\n".join(self._loud)

    @property
    def pid(self) -> int:
        """Of its present life."""
        return self._alive.pid

    @property
    def runs(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def _alive(self) -> Process:
        if self._process is None:
            raise RuntimeError(f"{self.name} does not run")
        return self._process

    async def _until(self, event: str) -> dict[str, Any]:
        async with asyncio.timeout(START_SECONDS):
            while line := await self._line():
                if line.startswith("{") and (said := json.loads(line))["event"] == event:
                    return dict(said)
        raise AssertionError(f"{self.name} ended without saying {event}:\n" + "\n".join(self._lines))

    async def _read(self) -> None:
        while await self._line():
            pass

    async def _line(self) -> str:
        assert self._alive.stdout is not None
        line = (await self._alive.stdout.readline()).decode()
        self._lines.append(line.rstrip())
        if '"exception"' in line or "Traceback" in line:
            self._loud.append(line.rstrip())
        return line


@dataclass(frozen=True)
class Processes:
    """A store, workers, and two routers: `router` has all workers, `lone` only the first of each kind.

    `far` is a third one, where it is wanted, that has only the others.
    """

    kvstore: Service
    prefill: list[Service]
    decode: list[Service]
    router: Service
    lone: Service
    ledger: Path
    clients: dict[Service, Client]
    far: Service | None = None

    @property
    def services(self) -> list[Service]:
        """Everything, in the order in which it should stop."""
        return [*([self.far] if self.far else []), self.lone, self.router, *self.prefill, *self.decode, self.kvstore]

    async def settled(self) -> None:
        """Return once no worker has anything to do or hold, and the store leases nothing. Fails when that stays so."""
        await settled((*self.prefill, *self.decode), (self.kvstore,))

    def assert_calm(self) -> None:
        """Everybody lives, and nobody logged a defect."""
        for each in self.services:
            each.assert_calm()

    def record(self, request_id: str) -> dict[str, Any]:
        """The one usage record of a request."""
        (record,) = self._records(request_id)
        return record

    def recorded(self, request_id: str) -> bool:
        """Whether its record is written."""
        return bool(self._records(request_id))

    def _records(self, request_id: str) -> list[dict[str, Any]]:
        records = [json.loads(line) for line in self.ledger.read_text().splitlines()]
        return [each for each in records if each["request_id"] == request_id]


@asynccontextmanager
async def running(
    folder: Path,
    model: Path,
    *worker: str,
    every: Sequence[str] = (),
    router: Sequence[str] = (),
    store: Sequence[str] = (),
    far: bool = False,
) -> AsyncIterator[Processes]:
    """Run two workers of each kind inside the block. On leaving, all must drain.

    Args:
        folder: of the arena and the ledger.
        model: that the workers serve.
        worker: what all workers are told.
        every: what every process is told.
        router: what both routers are told.
        store: what the store is told.
        far: whether there is a third router.
    """
    kvstore = node(folder, *store, *every)
    ledger = folder / "usage.jsonl"
    async with AsyncExitStack() as stack:
        stack.push_async_callback(kvstore.clear)
        await kvstore.start()
        told = ("--model", str(model), "--kvstore", kvstore.address, "--kv-bytes", "64MiB", *worker, *every)
        prefill, decode = ([Service(kind, *told) for _ in range(2)] for kind in ("prefill", "decode"))
        for each in (*prefill, *decode):
            stack.push_async_callback(each.clear)
        await asyncio.gather(*(each.start() for each in (*prefill, *decode)))
        told = ("--usage-log", str(ledger), *router, *every)
        both, lone, other = (router_of(prefill[of], decode[of], *told) for of in (slice(2), slice(1), slice(1, None)))
        clients = {}
        for each in (both, lone, *([other] if far else [])):
            stack.push_async_callback(each.clear)
            await each.start()
            clients[each] = await stack.enter_async_context(Client(each.address))
        whole = Processes(kvstore, prefill, decode, both, lone, ledger, clients, other if far else None)
        yield whole
        for each in whole.services:
            each.close_stdin()
            assert await each.ended() == 0


def node(folder: Path, *told: str) -> Service:
    """A store node with its arena in a folder."""
    # A killed writer's slots come back after the time for a copy, which is long for machines and short for tests.
    arena = ("--arena-bytes", str(64 << 20), "--arena-directory", str(folder), "--reservation-seconds", "1")
    return Service("kvstore", *arena, *told)


def router_of(prefill: Sequence[Service], decode: Sequence[Service], *told: str) -> Service:
    return Service(
        "router",
        *("--prefill", ",".join(each.address for each in prefill)),
        *("--decode", ",".join(each.address for each in decode)),
        *("--http-listen", "127.0.0.1:0", *told),
    )
