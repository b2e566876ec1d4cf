"""Waiting until processes of a cluster, whoever started them, have nothing left to do or hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from twostroke.cluster import WorkerInfo, WorkerLoad
from twostroke.rpc.channel import connect
from twostroke.v1 import kvstore_pb2, kvstore_pb2_grpc, worker_pb2, worker_pb2_grpc
from twostroke.wire import worker as worker_wire

SETTLE_SECONDS = 20.0


class Reached(Protocol):
    """A process that serves."""

    @property
    def address(self) -> str:
        """Its host:port."""


@dataclass(frozen=True)
class Address:
    """A process that somebody else started."""

    address: str


async def settled(workers: Iterable[Reached], stores: Iterable[Reached], seconds: float = SETTLE_SECONDS) -> None:
    """Return once no worker has anything to do or hold, and no store leases anything. Fails when that stays so."""
    await asyncio.gather(*(idle(worker) for worker in workers))
    await asyncio.gather(*(released(store, seconds) for store in stores))


async def store_status(node: Reached) -> kvstore_pb2.GetStoreStatusResponse:
    """What a store says of itself."""
    async with connect(node.address) as channel:
        store = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        return await store.GetStatus(kvstore_pb2.GetStoreStatusRequest(), timeout=SETTLE_SECONDS)


async def released(node: Reached, seconds: float = SETTLE_SECONDS) -> None:
    """Return when a store leases, reserves and fetches nothing. Fails when that does not come."""
    status = kvstore_pb2.GetStoreStatusResponse()
    try:
        async with asyncio.timeout(seconds):
            while True:
                status = await store_status(node)
                held = (status.leases, status.leased_blocks, status.reserved, status.quarantined)
                if not any(held) and not status.peers.fetching:
                    assert status.free + status.committed == status.slots, f"the store has lost slots:\n{status}"
                    return
                await asyncio.sleep(0.01)  # leases end by time: there is no event to wait for
    except TimeoutError:
        raise AssertionError(f"the store still holds:\n{status}") from None


async def idle(worker: Reached) -> None:
    """Return when a worker has nothing to do and every page back."""
    async with _watched(worker) as (info, loads):
        async for load in loads:
            if not (load.running or load.waiting) and load.free_pages + load.evictable_pages == info.pages:
                return


async def at_work(worker: Reached, *, steps: int) -> None:
    """Return when a worker has done so many steps of what it has in hand, and is not done."""
    done = 0
    async with _watched(worker) as (_, loads):
        async for load in loads:
            if not load.running:
                done = load.steps
            elif load.steps - done >= steps:
                return


async def first_at_work(workers: Mapping[str, Reached]) -> str:
    """The name of the worker that is the first to do a step of what it has in hand."""
    working = {asyncio.create_task(at_work(worker, steps=1)): name for name, worker in workers.items()}
    try:
        done, _ = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
        (task,) = done
        await task
        return working[task]
    finally:
        for task in working:
            task.cancel()
        await asyncio.wait(working)


@asynccontextmanager
async def _watched(worker: Reached) -> AsyncIterator[tuple[WorkerInfo, AsyncIterator[WorkerLoad]]]:
    """What a worker is, and its load from now on."""
    channel = connect(worker.address)
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    try:
        told = await stub.GetInfo(worker_pb2.GetInfoRequest(), wait_for_ready=True, timeout=SETTLE_SECONDS)
        reports = stub.WatchLoad(worker_pb2.WatchLoadRequest(interval_ms=10), timeout=SETTLE_SECONDS)
        yield worker_wire.worker_info(told.info), (worker_wire.load(each.load) async for each in reports)
    finally:
        await channel.close()
