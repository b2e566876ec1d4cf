"""A cluster over several hosts: every service in a process of its own, in the namespaces of its host."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.hosts import Network
from tests.support.processes import Service
from tests.support.watched import SETTLE_SECONDS, idle, released
from twostroke.client import Client

ARENA_BYTES = 64 << 20


@dataclass(frozen=True)
class Spread:
    """What runs, by host. A host has one worker of a kind at most."""

    network: Network
    stores: Mapping[str, Service]
    prefill: Mapping[str, Service]
    decode: Mapping[str, Service]
    every: Sequence[str]
    _routers: dict[Service, Client]
    _stack: AsyncExitStack

    @property
    def services(self) -> list[Service]:
        """Everything, in the order in which it should stop."""
        return [*self._routers, *self.prefill.values(), *self.decode.values(), *self.stores.values()]

    async def router(self, prefill: Sequence[str], decode: Sequence[str], *told: str) -> Client:
        """Start a router here, for the workers on these hosts; answers a client of it."""
        service = Service(
            "router",
            *("--prefill", ",".join(self.prefill[host].address for host in prefill)),
            *("--decode", ",".join(self.decode[host].address for host in decode)),
            *("--http-listen", "127.0.0.1:0", *told, *self.every),
        )
        self._stack.push_async_callback(service.clear)
        await service.start()
        client = self._routers[service] = await self._stack.enter_async_context(Client(service.address))
        return client

    async def settled(self) -> None:
        """Return once routers know all workers, no worker has anything to do or hold, and no store leases anything.

        Fails when that does not come.
        """
        await asyncio.gather(*(_knows_all(client) for client in self._routers.values()))
        await asyncio.gather(*(idle(worker) for worker in (*self.prefill.values(), *self.decode.values())))
        await asyncio.gather(*(released(store) for store in self.stores.values()))


@asynccontextmanager
async def spread(
    network: Network,
    model: Path,
    *,
    stores: Sequence[str],
    prefill: Mapping[str, str],
    decode: Mapping[str, str],
    store: Sequence[str] = (),
    worker: Sequence[str] = (),
    every: Sequence[str] = (),
) -> AsyncIterator[Spread]:
    """Run stores and workers inside the block. On leaving, all must drain.

    Args:
        network: whose hosts they run at.
        model: that the workers serve.
        stores: hosts of stores.
        prefill: hosts of prefill workers, and the host of the store that each uses.
        decode: the same of decode workers.
        store: what all stores are told.
        worker: what all workers are told.
        every: what every process is told.
    """
    async with AsyncExitStack() as stack:

        async def started(services: dict[str, Service]) -> dict[str, Service]:
            for service in services.values():
                stack.push_async_callback(service.clear)
            await asyncio.gather(*(service.start() for service in services.values()))
            return services

        arena = ("--arena-bytes", str(ARENA_BYTES), "--reservation-seconds", "1")

        def node(host: str) -> Service:
            data = ("--data-listen", f"{network[host].address}:0")
            return Service("kvstore", *arena, *data, *store, *every, at=network[host])

        nodes = await started({host: node(host) for host in stores})

        def workers(kind: str, places: Mapping[str, str]) -> dict[str, Service]:
            told = ("--model", str(model), "--kv-bytes", "64MiB", *worker, *every)
            return {
                host: Service(kind, "--kvstore", nodes[place].address, *told, at=network[host])
                for host, place in places.items()
            }

        first, second = await asyncio.gather(started(workers("prefill", prefill)), started(workers("decode", decode)))
        whole = Spread(network, nodes, first, second, every, {}, stack)
        yield whole
        for each in whole.services:
            each.close_stdin()
            assert await each.ended() == 0


async def _knows_all(router: Client) -> None:
    """Return when a router can give work to all of its workers."""
    async with asyncio.timeout(SETTLE_SECONDS):
        while not all(worker.available for worker in (await router.status()).workers):
            await asyncio.sleep(0.05)  # it tells nobody when a worker joins
