"""What workers and stores say of themselves, waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from twostroke.cluster import WorkerInfo, WorkerLoad
from twostroke.rpc.channel import connect
from twostroke.v1 import kvstore_pb2, kvstore_pb2_grpc, worker_pb2, worker_pb2_grpc
from twostroke.wire import worker as worker_wire

if TYPE_CHECKING:
    from tests.support.processes import Service

SETTLE_SECONDS = 20.0


async def idle(worker: Service) -> None:
    """Return when a worker has nothing to do and every page back."""
    async with _watched(worker) as (info, loads):
        async for load in loads:
            if not (load.running or load.waiting) and load.free_pages + load.evictable_pages == info.pages:
                return


async def released(kvstore: Service) -> None:
    """Return when a store leases and reserves nothing. Fails when that does not come."""
    channel, status = connect(kvstore.address), kvstore_pb2.GetStoreStatusResponse()
    try:
        store = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        async with asyncio.timeout(SETTLE_SECONDS):
            while True:
                status = await store.GetStatus(kvstore_pb2.GetStoreStatusRequest(), timeout=SETTLE_SECONDS)
                if not (status.leases or status.leased_blocks or status.reserved or status.quarantined):
                    assert status.free + status.committed == status.slots, f"the store has lost slots:\n{status}"
                    return
                await asyncio.sleep(0.005)  # leases end by time: there is no event to wait for
    except TimeoutError:
        raise AssertionError(f"the store still holds:\n{status}") from None
    finally:
        await channel.close()


async def at_work(worker: Service, *, steps: int) -> None:
    """Return when a worker has done so many steps of what it has in hand, and is not done."""
    done = 0
    async with _watched(worker) as (_, loads):
        async for load in loads:
            if not load.running:
                done = load.steps
            elif load.steps - done >= steps:
                return


async def first_at_work(workers: Mapping[str, Service]) -> str:
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
