"""Stores: control connections to the store nodes that the workers use, as the workers tell."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from twostroke.errors import TwostrokeError, Unavailable
from twostroke.kv.client import KvStoreClient
from twostroke.kv.format import KvFormat
from twostroke.kv.refs import Lease
from twostroke.rpc.channel import connect

T = TypeVar("T")
MAX_STORES = 1_024  # that are known at once; one more is as good as away


class Stores:
    """One connection to each node, opened when it is first needed.

    Args:
        kv_format: answers the format of the blocks as soon as it is known.
        addresses: answers the nodes that workers use now.
    """

    def __init__(self, kv_format: Callable[[], KvFormat | None], addresses: Callable[[], Iterable[str]]) -> None:
        self._kv_format = kv_format
        self._addresses = addresses
        self._clients: dict[str, KvStoreClient] = {}

    @classmethod
    @asynccontextmanager
    async def connected(
        cls, kv_format: Callable[[], KvFormat | None], addresses: Callable[[], Iterable[str]]
    ) -> AsyncIterator[Stores]:
        """Leaving the block waits for releases under way, within their time limit, and ends all connections."""
        stores = cls(kv_format, addresses)
        try:
            yield stores
        finally:
            await asyncio.gather(*(client.close() for client in stores._clients.values()))

    async def lookup(self, keys: Sequence[bytes], deadline: float) -> int:
        """How many leading keys the node holds that holds most: the others can get blocks from it.

        Nodes that do not answer hold none. Raises TwostrokeError, when none answers.
        """
        return max(await self.answers(lambda node: node.lookup(keys, deadline=deadline)), default=0)

    async def answers(self, ask: Callable[[KvStoreClient], Awaitable[T]]) -> list[T]:
        """What each node answers, all asked at once; those that fail say nothing.

        Raises: TwostrokeError, when none answers.
        """
        asked = (ask(self._at(address)) for address in self._addresses())
        answers = await asyncio.gather(*asked, return_exceptions=True)
        told = [answer for answer in answers if not isinstance(answer, BaseException)]
        for answer in answers:
            if isinstance(answer, BaseException) and not (told and isinstance(answer, TwostrokeError)):
                raise answer
        return told

    async def renew(self, lease: Lease) -> None:
        """Prolong a lease. Raises NotFound, when it has ended; TwostrokeError."""
        await self._at(lease.address).renew(lease)

    def release(self, lease: Lease) -> None:
        """End a lease, in a task that nobody waits for; one whose node is not known ends by time."""
        with contextlib.suppress(Unavailable):
            if lease.address:
                self._at(lease.address).release(lease)

    def _at(self, address: str) -> KvStoreClient:
        client = self._clients.get(address)
        if client is None:
            if len(self._clients) >= MAX_STORES:
                raise Unavailable(f"{MAX_STORES} stores are known; one more cannot be used")
            client = self._clients[address] = KvStoreClient(connect(address), self._kv_format)
        return client
