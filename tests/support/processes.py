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

from twostroke.client import Client
from twostroke.cluster import WorkerInfo, WorkerLoad
from twostroke.rpc.channel import connect
from twostroke.v1 import kvstore_pb2, kvstore_pb2_grpc, worker_pb2, worker_pb2_grpc
from twostroke.wire import worker as worker_wire

ROOT = Path(__file__).parents[2]
START_SECONDS = 60.0
STOP_SECONDS = 30.0
SETTLE_SECONDS = 20.0


class Service:
    """`python -m services.NAME`, told the same in all its lives."""

    def __init__(self, name: str, *told: str) -> None:
        self.name = name
        self.address = "127.0.0.1:0"  # the port of the first life is kept
        self._told = told
        self._process: Process | None = None
        self._lines: deque[str] = deque(maxlen=200)
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start it, and wait until it serves; a router, until it is ready."""
        told = ("--listen", self.address, "--drain-seconds", "20", "--stop-with-stdin", *self._told)
        command = (sys.executable, "-m", f"services.{self.name}", *told)
        self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=STDOUT, cwd=ROOT)
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

    @property
    def runs(self) -> bool:
        """Whether it was started and has not been seen to end."""
        return self._process is not None

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
        return line


@dataclass(frozen=True)
class Processes:
    """A store, workers, and two routers: `router` has all workers, `lone` only the first of each kind."""

    kvstore: Service
    prefill: list[Service]
    decode: list[Service]
    router: Service
    lone: Service
    ledger: Path
    clients: dict[Service, Client]

    @property
    def services(self) -> list[Service]:
        """Everything, in the order in which it should stop."""
        return [self.lone, self.router, *self.prefill, *self.decode, self.kvstore]

    async def settled(self) -> None:
        """Return once no worker has anything to do or hold, and the store leases nothing. Fails when that stays so."""
        await asyncio.gather(*(idle(worker) for worker in (*self.prefill, *self.decode)))
        channel, status = connect(self.kvstore.address), kvstore_pb2.GetStoreStatusResponse()
        try:
            store = kvstore_pb2_grpc.KvStoreServiceStub(channel)
            async with asyncio.timeout(SETTLE_SECONDS):
                while True:
                    status = await store.GetStatus(kvstore_pb2.GetStoreStatusRequest(), timeout=SETTLE_SECONDS)
                    if not (status.leases or status.leased_blocks or status.reserved or status.quarantined):
                        return
                    await asyncio.sleep(0.005)  # leases end by time: there is no event to wait for
        except TimeoutError:
            raise AssertionError(f"the store still holds:\n{status}") from None
        finally:
            await channel.close()

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
) -> AsyncIterator[Processes]:
    """Run two workers of each kind inside the block. On leaving, all must drain.

    Args:
        folder: of the arena and the ledger.
        model: that the workers serve.
        worker: what all workers are told.
        every: what every process is told.
        router: what both routers are told.
        store: what the store is told.
    """
    # A killed writer's slots come back after the time for a copy, which is long for machines and short for tests.
    arena = ("--arena-bytes", str(64 << 20), "--arena-directory", str(folder), "--reservation-seconds", "1")
    kvstore = Service("kvstore", *arena, *store, *every)
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
        both, lone = (_router(prefill[:count], decode[:count], *told) for count in (2, 1))
        clients = {}
        for each in (both, lone):
            stack.push_async_callback(each.clear)
            await each.start()
            clients[each] = await stack.enter_async_context(Client(each.address))
        whole = Processes(kvstore, prefill, decode, both, lone, ledger, clients)
        yield whole
        for each in whole.services:
            each.close_stdin()
            assert await each.ended() == 0


def _router(prefill: Sequence[Service], decode: Sequence[Service], *told: str) -> Service:
    return Service(
        "router",
        *("--prefill", ",".join(each.address for each in prefill)),
        *("--decode", ",".join(each.address for each in decode)),
        *("--http-listen", "127.0.0.1:0", *told),
    )


async def idle(worker: Service) -> None:
    """Return when a worker has nothing to do and every page back."""
    async with _watched(worker) as (info, loads):
        async for load in loads:
            if not (load.running or load.waiting) and load.free_pages + load.evictable_pages == info.pages:
                return


async def at_work(worker: Service, *, steps: int) -> None:
    """Return when a worker has done so many steps of what it has in hand, and is not done."""
    done = 0
    async with _watched(worker) as (_, loads):
        async for load in loads:
            if not load.running:
                done = load.steps
            elif load.steps - done >= steps:
                return


@asynccontextmanager
async def _watched(worker: Service) -> AsyncIterator[tuple[WorkerInfo, AsyncIterator[WorkerLoad]]]:
    """What a worker is, and its load from now on."""
    channel = connect(worker.address)
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    try:
        told = await stub.GetInfo(worker_pb2.GetInfoRequest(), wait_for_ready=True, timeout=SETTLE_SECONDS)
        reports = stub.WatchLoad(worker_pb2.WatchLoadRequest(interval_ms=10), timeout=SETTLE_SECONDS)
        yield worker_wire.worker_info(told.info), (worker_wire.load(each.load) async for each in reports)
    finally:
        await channel.close()
