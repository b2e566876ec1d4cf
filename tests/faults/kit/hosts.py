"""Two hosts' worth of processes on one machine: a store node, workers and a router on each side, and Redis between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.faults.kit.relay import Relay
from tests.support.processes import Service, node, router_of
from tests.support.redis import RedisServer, redis_server
from tests.support.settling import settled
from twostroke.client import Client

# Heartbeats every second; limits that a busy machine keeps.
DIRECTORY = (
    *("--directory-ttl-seconds", "3", "--redis-retry-seconds", "0.2"),
    *("--redis-lookup-seconds", "0.7", "--redis-write-seconds", "0.7"),
)


@dataclass(frozen=True)
class Side:
    """One host: whoever asks its router is served by its workers, which know its node only."""

    node: Service
    prefill: Service
    decode: Service
    router: Service
    client: Client
    relay: Relay

    @property
    def services(self) -> list[Service]:
        """All of it, in the order in which it should stop."""
        return [self.router, self.prefill, self.decode, self.node]

    @classmethod
    @asynccontextmanager
    async def started(cls, folder: Path, model: Path, redis: RedisServer, *worker: str) -> AsyncIterator[Self]:
        """Run it inside the block. On leaving, all must drain."""
        await asyncio.to_thread(folder.mkdir)
        async with AsyncExitStack() as stack:
            relay = await stack.enter_async_context(Relay.to(redis.port))
            store = node(folder, "--redis-url", relay.url, *DIRECTORY)
            stack.push_async_callback(store.clear)
            await store.start()
            told = ("--model", str(model), "--kvstore", store.address, "--kv-bytes", "64MiB", *worker)
            prefill, decode = Service("prefill", *told), Service("decode", *told)
            for each in (prefill, decode):
                stack.push_async_callback(each.clear)
            await asyncio.gather(prefill.start(), decode.start())
            door = router_of([prefill], [decode], "--usage-log", str(folder / "usage.jsonl"))
            stack.push_async_callback(door.clear)
            await door.start()
            client = await stack.enter_async_context(Client(door.address))
            side = cls(store, prefill, decode, door, client, relay)
            yield side
            for each in side.services:
                each.close_stdin()
                assert await each.ended() == 0


@dataclass(frozen=True)
class Hosts:
    """Both sides."""

    redis: RedisServer
    far: Side
    near: Side

    @classmethod
    @asynccontextmanager
    async def started(cls, folder: Path, model: Path, *worker: str) -> AsyncIterator[Self]:
        """Run everything inside the block."""
        with redis_server(folder) as redis:
            await asyncio.to_thread(redis.start)
            async with (
                Side.started(folder / "far", model, redis, *worker) as far,
                Side.started(folder / "near", model, redis, *worker) as near,
            ):
                yield cls(redis, far, near)

    @property
    def sides(self) -> tuple[Side, Side]:
        """Both."""
        return (self.far, self.near)

    @property
    def services(self) -> list[Service]:
        """All processes of ours."""
        return [each for side in self.sides for each in side.services]

    async def settled(self) -> None:
        """Return once nobody has anything to do or hold. Fails when that stays so."""
        workers = [each for side in self.sides for each in (side.prefill, side.decode)]
        await settled(workers, [side.node for side in self.sides])
