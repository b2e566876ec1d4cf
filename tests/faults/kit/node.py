"""A store node, as the kit looks at it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tests.support.processes import Service
from tests.support.settling import Reached
from twostroke.rpc.channel import connect
from twostroke.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc

if TYPE_CHECKING:
    from twostroke.v1.kvstore_pb2_grpc import KvStoreServiceAsyncStub

CALL_SECONDS = 5.0
WAIT_SECONDS = 20.0

Status = kvstore_pb2.GetStoreStatusResponse


class StoreNode:
    """A node, whoever started it."""

    def __init__(self, node: Reached) -> None:
        self.address = node.address
        self._format: common_pb2.KvFormat | None = None  # of the blocks, as the node was told by its first worker

    async def status(self) -> Status:
        """How it is."""
        async with _stub(self.address) as stub:
            status = await stub.GetStatus(kvstore_pb2.GetStoreStatusRequest(), timeout=CALL_SECONDS)
        if status.HasField("format"):
            self._format = status.format
        return status

    async def until(self, holds: Callable[[Status], bool]) -> Status:
        """How it is, as soon as that is as wanted. Raises AssertionError."""
        status = Status()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while not holds(status := await self.status()):
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"the store never came to be as it should:\n{status}") from None
        return status

    async def attach(self) -> None:
        """Tell it which blocks it will have, before any worker does: it opens its disk."""
        assert self._format is not None, "the node was never told a format"
        async with _stub(self.address) as stub:
            await stub.Attach(kvstore_pb2.AttachRequest(format=self._format), timeout=CALL_SECONDS)

    async def known_to(self, services: Sequence[Service], ask: Callable[[], Awaitable[object]]) -> None:
        """Return when all of these have attached to this life of it, which they do when they need it: so `ask`."""
        name = (await self.status()).incarnation
        async with asyncio.timeout(WAIT_SECONDS):
            while not all(any(name in line and "attached" in line for line in each.lines) for each in services):
                await ask()


@asynccontextmanager
async def _stub(address: str) -> AsyncIterator[KvStoreServiceAsyncStub]:
    channel = connect(address)
    try:
        yield kvstore_pb2_grpc.KvStoreServiceStub(channel)
    finally:
        await channel.close()
