"""BlockStoreClient: a worker's access to its host's store, control and bytes."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import grpc

from twostroke.errors import Unavailable
from twostroke.kv.client import KvStoreClient
from twostroke.kv.format import KvFormat
from twostroke.kv.layout import Attachment
from twostroke.kv.refs import ORDINARY, BlockRef, Lease, Terms
from twostroke.kv.transport import BlockTransport, Tenancy
from twostroke.kv.transport.calls import StoreCalls
from twostroke.kv.transport.pages import Pages
from twostroke.kv.transport.shm import SharedMemoryTransport
from twostroke.kv.transport.streams import StreamTransport
from twostroke.rpc.channel import connect

log = logging.getLogger(__name__)

Moved = TypeVar("Moved")


@dataclass(frozen=True, slots=True)
class Stored:
    """What the store holds after a write, all under the lease; blocks that found no room are absent.

    So are those that were left to another writer, who had reserved them: `await_committed` waits for that one.
    """

    lease: Lease
    refs: tuple[BlockRef, ...]
    writing: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class Loaded:
    """How many leading blocks were read whole, all under the lease."""

    lease: Lease
    blocks: int


class TransportChoice(enum.Enum):
    """How block bytes move."""

    AUTO = "auto"  # shared memory where the arena can be mapped, else gRPC streams
    SHARED_MEMORY = "shm"
    GRPC = "grpc"


class BlockStoreClient(KvStoreClient):
    """Reads blocks into a worker's pages and writes its pages as blocks."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        kv_format: KvFormat,
        pages: Pages,
        *,
        transport: TransportChoice = TransportChoice.AUTO,
        lease_seconds: float = 30.0,
    ) -> None:
        super().__init__(channel, lambda: kv_format, writes=True)
        self._lease_seconds = lease_seconds
        self._pages = pages
        self._choice = transport
        self._transport: BlockTransport | None = None
        self._node: Attachment | None = None  # that the transport belongs to
        self._transfers: Counter[BlockTransport] = Counter()  # under way
        self._retired: set[BlockTransport] = set()

    @classmethod
    @asynccontextmanager
    async def opened(
        cls,
        address: str,
        kv_format: KvFormat,
        pages: Pages,
        *,
        transport: TransportChoice = TransportChoice.AUTO,
        lease_seconds: float = 30.0,
    ) -> AsyncIterator[BlockStoreClient]:
        """Use the store at `address` inside the block.

        A store that is not there yet is attached to later. Raises FormatMismatch, when it is there with other blocks.
        """
        channel = connect(address)
        client = cls(channel, kv_format, pages, transport=transport, lease_seconds=lease_seconds)
        try:
            try:
                client._transport_to(await client.attached())
            except Unavailable as error:
                log.warning("the store is not there yet", extra={"address": address, "error": error.message})
            yield client
        finally:
            await client.released()
            client._retire()
            await client._close_retired()
            await channel.close()

    def new_lease(self) -> Lease:
        """A lease for the next transfer to open."""
        return Lease.named(self._lease_seconds)

    async def write_blocks(
        self,
        lease: Lease | None,
        blocks: Sequence[tuple[bytes, int]],
        pages: Sequence[int],
        terms: Terms = ORDINARY,
        *,
        deadline: float | None = None,
    ) -> Stored:
        """Store blocks (key, tokens) from pages on these terms, unless they are held already; all join the lease.

        A lease that is not open yet is opened by it; whoever named it releases it, whatever becomes of this call.
        Without one, a new one is opened, which ends with a call that fails.

        The pages may be given back once this returns or raises, also when it is cancelled.

        Raises: TwostrokeError, when the store is in trouble.
        """
        tenancy = Tenancy(lease or self.new_lease(), terms)
        refs = await self._whole(self._write(tenancy, blocks, pages, deadline), None if lease else tenancy.lease)
        return Stored(tenancy.lease, tuple(refs), frozenset(tenancy.writing))

    async def read_blocks(
        self,
        lease: Lease | None,
        keys: Sequence[bytes],
        pages: Sequence[int],
        terms: Terms = ORDINARY,
        *,
        source: Lease | None = None,
        deadline: float | None = None,
    ) -> Loaded:
        """Fill pages with the longest held prefix of the keys, which joins the lease, as in `write_blocks`.

        Blocks that the node brings into its arena for it take of the share of `terms`' namespace. It gets them from the
        node of `source`, too, under that lease, and from others that it knows of.

        The pages may be given back once this returns or raises, also when it is cancelled.

        Raises: TwostrokeError, when the store is in trouble.
        """
        tenancy = Tenancy(lease or self.new_lease(), terms)
        tenancy.source = source
        count = await self._whole(self._read(tenancy, keys, pages, deadline), None if lease else tenancy.lease)
        return Loaded(tenancy.lease, count)

    async def _whole(self, moving: Coroutine[None, None, Moved], ours: Lease | None) -> Moved:
        """Carry a transfer to its end even when its caller is cancelled meanwhile.

        Only then are its pages and slots free. Where it comes to nothing, a lease of which nobody else knows is
        released. Every step has a time limit.
        """
        task = asyncio.create_task(moving, name="transfer")
        try:
            return await asyncio.shield(task)
        except BaseException:
            while not task.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({task})
            if not task.cancelled() and (error := task.exception()) is not None:
                log.debug("transfer failed", extra={"error": str(error)})  # a cancelled caller does not see it
            if ours is not None:
                self.release(ours)
            raise

    async def _write(
        self, tenancy: Tenancy, blocks: Sequence[tuple[bytes, int]], pages: Sequence[int], deadline: float | None
    ) -> list[BlockRef]:
        refs: list[BlockRef] = []
        async with self._transport_in_use(deadline) as (transport, max_keys):
            for part in _parts(len(blocks), max_keys):
                refs += await transport.write(tenancy, blocks[part], pages[part], deadline)
        return refs

    async def _read(self, tenancy: Tenancy, keys: Sequence[bytes], pages: Sequence[int], deadline: float | None) -> int:
        count = 0
        async with self._transport_in_use(deadline) as (transport, max_keys):
            for part in _parts(len(keys), max_keys):
                count += await transport.read(tenancy, keys[part], pages[part], deadline)
                if count < min(part.stop, len(keys)):
                    break
        return count

    @asynccontextmanager
    async def _transport_in_use(self, deadline: float | None) -> AsyncIterator[tuple[BlockTransport, int]]:
        """The transport to the node as it is now, for one transfer; and the most keys of a call.

        A transport to a node that has restarted is closed behind its last transfer.
        """
        node = await self.usable(deadline)
        transport = self._transport_to(node)
        self._transfers[transport] += 1
        try:
            await self._close_retired()
            yield transport, node.max_keys
        finally:
            self._transfers[transport] -= 1
            await self._close_retired()

    def _transport_to(self, node: Attachment) -> BlockTransport:
        if self._transport is None or self._node is not node:
            self._retire()
            self._transport, self._node = self._open(node), node
            log.info("blocks move", extra={"transport": self._transport.name})
        return self._transport

    def forget(self, node: Attachment) -> None:
        """Attach anew before the next call, and give up what was held as the writer that the node knows."""
        super().forget(node)
        if self._node is node:
            self._retire()
            self._behind(self._close_retired(), name="retire")

    def _retire(self) -> None:
        if self._transport is not None:
            self._retired.add(self._transport)
            self._transport = None

    async def _close_retired(self) -> None:
        for transport in [each for each in self._retired if not self._transfers[each]]:
            self._retired.discard(transport)
            del self._transfers[transport]
            await transport.close()

    def _open(self, node: Attachment) -> BlockTransport:
        calls = StoreCalls(self, node)
        if self._choice is TransportChoice.GRPC:
            return StreamTransport(calls, self._pages)
        try:
            return SharedMemoryTransport(calls, self._pages)
        except Unavailable as error:
            if self._choice is TransportChoice.SHARED_MEMORY:
                raise
            log.info("the arena cannot be mapped", extra={"error": error.message})
            return StreamTransport(calls, self._pages)


def _parts(count: int, most: int) -> Iterator[slice]:
    """Cut a transfer into calls; one without blocks is one call too, since it may open a lease."""
    return (slice(start, start + most) for start in range(0, max(1, count), most))
