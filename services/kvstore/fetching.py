"""Fetching: blocks that one other node holds come into slots of our own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from services.kvstore.blocks import Blocks
from services.kvstore.neighbor import Granted
from services.kvstore.neighbors import Neighbors
from twostroke.errors import DeadlineExceeded, NotFound, TwostrokeError, Unavailable, WorkerLost
from twostroke.kv.messages import WrittenBlock
from twostroke.kv.refs import BlockSlot, Lease, Reservation, Terms
from twostroke.kv.transport.peer import Peers, Pulled

PART_BYTES = 32 << 20  # read in one go, then published: what has come is there for a caller whose time is up
CONTROL_SHARE = 0.5  # of a fetch's time that a node may take until it has granted blocks


@dataclass(frozen=True, slots=True)
class Order:
    """What is wanted, for whose lease and in whose share of the arena."""

    lease: Lease
    keys: Sequence[bytes]
    namespace: str


@dataclass(frozen=True, slots=True)
class Holder:
    """One life of a node that is said to hold the blocks, and the lease there that may be used, if any."""

    address: str
    incarnation: str
    source: Lease | None = None


@dataclass(slots=True)
class FetchStats:
    """What has come since the node began."""

    blocks: int = 0
    bytes: int = 0
    misses: int = 0  # nodes that were asked and brought nothing


class Fetching:
    """Reads from one node at a time what that grants; whatever happens to the peer is a miss.

    Args:
        ways: to the bytes of blocks.
    """

    def __init__(self, blocks: Blocks, neighbors: Neighbors, ways: Peers) -> None:
        self.stats = FetchStats()
        self.neighbors = neighbors
        self.ways = ways
        self._blocks = blocks

    async def fetch(self, order: Order, holder: Holder, seconds: float) -> bool:
        """Bring what the holder has of leading keys; answers whether that was anything. Never raises TwostrokeError."""
        if self.neighbors.is_paused(holder.address):
            return False
        start = asyncio.get_running_loop().time()
        with contextlib.suppress(TwostrokeError):  # a peer's trouble is logged and counted where it is paused
            async with self.neighbors.asked(holder.address) as neighbor:
                granted = await neighbor.grant(
                    order.keys,
                    order.namespace,
                    start + CONTROL_SHARE * seconds,
                    life=holder.incarnation,
                    source=holder.source,
                )
                try:
                    await self._bring(granted, order.lease, start + seconds)
                finally:
                    neighbor.release(granted)
        brought = self._blocks.lookup(order.keys, order.lease.id) > 0
        self.stats.misses += not brought
        return brought

    async def close(self) -> None:
        """Close all connections; no fetch is under way."""
        await self.ways.close()
        await self.neighbors.close()

    async def _bring(self, granted: Granted, lease: Lease, deadline: float) -> None:
        """Read granted blocks and publish them. Raises TwostrokeError, where the peer is in trouble."""
        places = {place.block.key: place for place in granted.places}
        with self._reserved(granted, lease) as slots:
            size = max(1, PART_BYTES // self._blocks.layout.block_bytes)
            for start in range(0, len(slots), size):
                part = slots[start : start + size]
                wanted = [places[each.key] for each in part]
                pulled = await self._pull(granted, wanted, part, deadline)
                self._publish(lease, wanted, part, pulled)
                if len(pulled.blocks) < len(part):
                    _judge(pulled.error, some=bool(start or pulled.blocks))
                    return

    @contextlib.contextmanager
    def _reserved(self, granted: Granted, lease: Lease) -> Iterator[Sequence[Reservation]]:
        """Slots for those that are not held here. Transient blocks stay so; those held here join the lease.

        That the source grants a transient block is the right to see it: so it joins though another lease brought it.
        """
        keys = [place.block.key for place in granted.places]
        slots: list[Reservation] = []
        try:
            for part, transient in ((keys[: granted.shared], False), (keys[granted.shared :], True)):
                terms = Terms(namespace=granted.grant.namespace, transient=transient)
                slots += self._blocks.reserve(lease, self._blocks.arena.incarnation, part, terms).slots
            yield slots
        finally:
            self._blocks.abandon(slots)  # those that were committed are no reservations any more

    async def _pull(
        self, granted: Granted, wanted: Sequence[BlockSlot], into: Sequence[Reservation], deadline: float
    ) -> Pulled:
        arena, layout = self._blocks.arena, self._blocks.layout
        with ExitStack() as open_blocks:
            memory = [open_blocks.enter_context(arena.block(layout, each.slot)) for each in into]
            return await self.ways.read(granted.offers, granted.grant, wanted, memory, deadline)

    def _publish(self, lease: Lease, wanted: Sequence[BlockSlot], slots: Sequence[Reservation], pulled: Pulled) -> None:
        """Commit the blocks that came whole; their checksums were verified."""
        checksums = self._blocks.layout.checksums
        written = [
            WrittenBlock(slot.written(place.block.tokens), seal.checksum if checksums else None)
            for place, slot, seal in zip(wanted, slots, pulled.blocks, strict=False)
        ]
        self._blocks.commit(lease.id, written)
        self.stats.blocks += len(written)
        self.stats.bytes += len(written) * self._blocks.layout.block_bytes


def _judge(error: TwostrokeError | None, *, some: bool) -> None:
    """Raise what a read ended with where the peer is to blame: not for what it lost, and not for a slow link."""
    if error is None or isinstance(error, NotFound | WorkerLost):
        return
    if isinstance(error, DeadlineExceeded):
        if some:
            return
        raise Unavailable("the peer sent nothing in time") from error
    raise error
