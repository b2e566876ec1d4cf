"""Node: who may use the arena, and in which format, for one incarnation."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from services.kvstore.arena import Arena
from services.kvstore.blocks import Blocks
from services.kvstore.directory.peer import Peer
from services.kvstore.others import Others
from services.kvstore.promotion import Promotion
from services.kvstore.settings import DiskSettings, StoreSettings
from services.kvstore.spool import Spool, SpoolStats
from services.kvstore.supply import Supply
from twostroke.errors import InvalidRequest, Unavailable, WorkerLost
from twostroke.kv import proof
from twostroke.kv.format import ELEMENT_BYTES, KvFormat
from twostroke.kv.layout import ArenaLayout, Attachment, has_total_store_order
from twostroke.kv.limits import StoreLimits, StoreStats
from twostroke.kv.refs import Lease, Offer
from twostroke.kv.tiers.disk import DiskTier
from twostroke.kv.tiers.files import OpenFile, TierFile

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0  # for blocks that wait to be written to disk
MAX_DIMENSION = 1 << 16
_DIMENSIONS = ("layers", "kv_heads", "head_dim", "block_tokens")


class Node:
    """Empty until the first worker says what a block is; then the arena is cut into slots, once.

    Args:
        clock: seconds that never run backwards.
        open_file: opens the files of the disk.
    """

    def __init__(
        self,
        arena: Arena,
        settings: StoreSettings,
        disk: DiskSettings | None = None,
        others: Others | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        open_file: OpenFile = TierFile,
    ) -> None:
        self.format: KvFormat | None = None
        self.promotion: Promotion | None = None  # where there is a disk
        self.address = ""  # host:port where other hosts reach the node, as soon as it is known
        self.offers: tuple[Offer, ...] = ()  # ways in which they may read blocks
        self.key = proof.node_key(arena.incarnation)  # that leases are signed with in this life
        self.others = others or Others()
        self._arena = arena
        self._settings = settings
        self._disk = disk or DiskSettings()
        self._spool: Spool | None = None
        self._clock = clock
        self._open_file = open_file
        self._blocks: Blocks | None = None
        self._supply: Supply | None = None
        self._cut = asyncio.Event()

    @property
    def incarnation(self) -> str:
        """Names this life of the node; what was said to an older one is void."""
        return self._arena.incarnation

    @property
    def max_keys(self) -> int:
        """Keys, leases or blocks in one call."""
        return self._settings.max_keys

    @property
    def max_await_seconds(self) -> float:
        """How long a call waits for blocks, at most."""
        return self._settings.max_await_seconds

    @property
    def max_keep_seconds(self) -> float:
        """How long an advice to keep blocks holds, at most."""
        return self._settings.max_keep_seconds

    @property
    def block_tokens(self) -> int:
        """Most tokens of a block; 0 until the format is known."""
        return self.format.block_tokens if self.format else 0

    def attach(self, kv_format: KvFormat, writer_id: str, *, follows: bool = False) -> Attachment:
        """Introduce a worker, or a node that `follows` the format that one has brought.

        Raises: InvalidRequest; FormatMismatch, naming the field that differs from the node's; Unavailable, while the
            node does not know its own address yet, or has no format to follow.
        """
        if not self.address:
            raise Unavailable("the store is starting")
        if self.format is not None:
            self.format.require_equal(kv_format, who=writer_id or "the caller")
        elif follows:
            raise Unavailable("no worker has come yet")
        blocks = self._blocks or self._cut_for(kv_format)
        self._arena.forget_ended_writers()  # where one comes, another may have been killed
        return Attachment(
            incarnation=self.incarnation,
            writer_id=writer_id,
            layout=blocks.layout,
            max_keys=self.max_keys,
            max_lease_seconds=self._settings.max_lease_seconds,
            address=self.address,
            offers=self.offers,
        )

    def prove(self, lease: Lease, namespace: str) -> bytes:
        """What opens the blocks of a lease at this node's data plane, to who names the namespace."""
        return proof.sign(self.key, incarnation=self.incarnation, lease_id=lease.id, namespace=namespace)

    def supply(self, incarnation: str) -> Supply:
        """The ways to blocks, for a worker that attached to this incarnation. Raises WorkerLost for any other."""
        self.blocks(incarnation)
        if self._supply is None:
            raise WorkerLost("this store has restarted and is empty; attach again", field="incarnation")
        return self._supply

    def blocks(self, incarnation: str) -> Blocks:
        """The blocks, for a worker that attached to this incarnation. Raises WorkerLost for any other."""
        if incarnation != self.incarnation or self._blocks is None:
            raise WorkerLost("this store has restarted and is empty; attach again", field="incarnation")
        return self._blocks

    def stats(self) -> StoreStats:
        """How full the node is."""
        return self._blocks.stats() if self._blocks else StoreStats()

    def disk_stats(self) -> tuple[SpoolStats, int] | None:
        """How the disk is, and how many blocks were promoted; None without one."""
        return (self._spool.stats(), self.promotion.promoted) if self._spool and self.promotion else None

    async def close(self) -> None:
        """Leave the others, and write to disk what waits for it, for a bounded time; the arena is still open."""
        await self.others.close()
        if self._spool and self.promotion:
            await self.promotion.close()
            await self._spool.close(CLOSE_SECONDS)

    async def watch(self) -> None:
        """Give back what ends by time or with its writer, until cancelled."""
        await self._cut.wait()
        if self._blocks is not None:
            await self._blocks.watch()

    def _cut_for(self, kv_format: KvFormat) -> Blocks:
        _check(kv_format)
        settings = self._settings
        layout = self._arena.cut(kv_format.block_bytes, checksums=settings.checksums or not has_total_store_order())
        limits = StoreLimits(
            leases=settings.max_leases,
            lease_blocks=settings.max_lease_blocks,
            lease_seconds=settings.max_lease_seconds,
            reservation_seconds=settings.reservation_seconds,
            namespace_share=settings.namespace_share,
            keep_share=settings.keep_share,
            keep_seconds=settings.max_keep_seconds,
            waiting=settings.max_waiting_calls,
        )
        self._spool = self._spool_for(kv_format, layout)
        directory = self.others.join(self._card(), kv_format)
        self._blocks = Blocks(self._arena, layout, limits, self._clock, self._spool, directory)
        if self._spool:
            self.promotion = Promotion(self._blocks, self._spool, self._disk.disk_read_seconds)
        self._supply = Supply(self._blocks, self.promotion, self.others.serve(self._blocks, kv_format))
        self.format = kv_format
        self._cut.set()
        log.info(
            "cut the arena", extra={"slots": layout.slots, "block_bytes": layout.block_bytes, "model": kv_format.model}
        )
        return self._blocks

    def _card(self) -> Peer:
        """How the others will know this node."""
        offers = tuple((each.kind, each.address.decode()) for each in self.offers)
        return Peer(incarnation=self.incarnation, address=self.address, offers=offers, started=time.time())

    def _spool_for(self, kv_format: KvFormat, layout: ArenaLayout) -> Spool | None:
        directory = self._disk.disk_directory
        if directory is None:
            return None
        tier = DiskTier(directory, kv_format, self._disk.limits, clock=self._clock, open_file=self._open_file)
        return Spool(self._arena, layout, tier, queue=self._disk.disk_queue, clock=self._clock)


def _check(kv_format: KvFormat) -> None:
    """Raise InvalidRequest for a format that no arena can be cut for."""
    for name in _DIMENSIONS:
        if not 1 <= getattr(kv_format, name) <= MAX_DIMENSION:
            raise InvalidRequest(f"{name} must be from 1 to {MAX_DIMENSION}", field=f"kv_format.{name}")
    if kv_format.dtype not in ELEMENT_BYTES:
        raise InvalidRequest(f"dtype must be one of {', '.join(ELEMENT_BYTES)}", field="kv_format.dtype")
