"""Promotion: blocks of the tier below come back into the arena before they are leased."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from services.kvstore.blocks import Blocks
from services.kvstore.spool import Spool
from twostroke.kv.refs import Lease, Reservation, Terms

log = logging.getLogger(__name__)


class Promotion:
    """Brings blocks into slots that the node itself reserves, each block once for all who ask for it meanwhile.

    A promotion outlives who asked for it: its slots are being written to until its read has ended.

    Args:
        seconds: how long a caller waits.
    """

    def __init__(self, blocks: Blocks, spool: Spool, seconds: float) -> None:
        self.promoted = 0  # blocks, so far
        self._blocks = blocks
        self._spool = spool
        self._seconds = seconds
        self._under_way: dict[bytes, asyncio.Task[None]] = {}  # by key

    async def promote(self, lease: Lease, keys: Sequence[bytes], namespace: str) -> None:
        """Bring what the tier holds of leading keys into the arena, under the lease, as far as there are room and time.

        Raises: NotFound, when the lease has ended.
        """
        reachable = keys[: self._blocks.reachable(keys, lease.id)]
        # What the lease has may be transient, and stays so: reserving it on ordinary terms would show it to everyone.
        wanted = [key for key in reachable if self._blocks.leased(lease.id, key) is None]
        others = {self._under_way[key] for key in wanted if key in self._under_way}
        reserved = self._blocks.reserve(lease, self._blocks.arena.incarnation, wanted, Terms(namespace=namespace))
        if reserved.slots:
            others.add(self._begin(lease, reserved.slots))
        if others:
            await asyncio.wait(others, timeout=self._seconds)

    async def close(self) -> None:
        """Return when no promotion is under way; the spool is still open."""
        if self._under_way:
            await asyncio.wait(set(self._under_way.values()))

    def _begin(self, lease: Lease, slots: Sequence[Reservation]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._carry(lease, slots), name="promotion")
        self._under_way |= dict.fromkeys((each.key for each in slots), task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[None]) -> None:
        self._under_way = {key: each for key, each in self._under_way.items() if each is not task}

    async def _carry(self, lease: Lease, slots: Sequence[Reservation]) -> None:
        try:
            written = await self._spool.fetch(slots, self._seconds)
            self._blocks.commit(lease.id, written)
            self.promoted += len(written)
        except Exception:  # a defect of the tier is a miss, and must not keep slots
            log.exception("promotion failed", extra={"blocks": len(slots)})
        finally:
            self._blocks.abandon(slots)  # those that were committed are no reservations any more
