"""Blocks: the store of slots and the arena that holds them, kept in step."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence

from services.kvstore.arena import Arena
from services.kvstore.spool import Spool
from twostroke.errors import InvalidRequest, NotFound
from twostroke.kv.held import News
from twostroke.kv.layout import ArenaLayout
from twostroke.kv.limits import StoreLimits, StoreStats
from twostroke.kv.messages import WrittenBlock
from twostroke.kv.refs import ORDINARY, BlockRef, BlockSlot, Lease, Reservation, Terms
from twostroke.kv.store import BlockStore, Reserved

log = logging.getLogger(__name__)

LIVENESS_SECONDS = 1.0  # between looks at a suspected writer: the end of a process sends no event


class Blocks:
    """Every method but `watch` and `held_within` is complete without an await, so headers and store never disagree.

    What ends by time has ended for every call from its deadline on, whether or not `watch` has run by then.
    """

    def __init__(
        self,
        arena: Arena,
        layout: ArenaLayout,
        limits: StoreLimits,
        clock: Callable[[], float],
        spool: Spool | None = None,
        news: News | None = None,
    ) -> None:
        self.arena = arena
        self.layout = layout
        self._spool = spool
        self._store = BlockStore(layout.slots, limits, news)
        self._clock = clock
        self._sooner = asyncio.Event()  # something ends before `watch` would wake
        self._wake_at: float | None = None
        self._late: set[str] = set()  # writers with slots in quarantine

    def lease(self, lease_id: str, seconds: float, *, opens: bool = False) -> Lease:
        """Prolong a lease, or open it where it is not open. Raises NotFound, Overloaded."""
        now = self._advance()
        if opens and not self._store.renew([lease_id], 0.0, now):
            granted = self._store.open_lease(lease_id, seconds, now)
        else:
            granted = self._store.prolong(lease_id, seconds, now)
        self._hasten()
        return Lease(id=lease_id, seconds=granted, incarnation=self.arena.incarnation)

    def require_lease(self, lease_id: str) -> None:
        """Raise NotFound unless the lease is alive."""
        if not self.renew([lease_id], 0.0):
            raise NotFound("the lease has ended", field="lease_id")

    def renew(self, lease_ids: Iterable[str], seconds: float) -> list[str]:
        """Prolong each lease that is alive; answers which ones are."""
        now = self._advance()
        return self._store.renew(lease_ids, seconds, now)

    def release(self, lease_ids: Iterable[str]) -> None:
        """End leases."""
        self._advance()
        self._store.release(lease_ids)

    def lookup(self, keys: Iterable[bytes], lease_id: str = "") -> int:
        """How many leading keys are held, as seen under a lease."""
        self._advance()
        return self._store.lookup(keys, lease_id)

    def reachable(self, keys: Sequence[bytes], lease_id: str = "") -> int:
        """How many leading keys are held in the arena, as seen under a lease, or by the tier below it."""
        count = self.lookup(keys, lease_id)
        while self._spool and (below := self._spool.holds(keys[count:])):
            count += below
            count += self.lookup(keys[count:], lease_id)
        return count

    async def held_within(self, seconds: float, keys: Sequence[bytes]) -> int:
        """Wait until all keys are held, or nothing more is to be expected; answers how many leading ones are.

        Raises: Overloaded, when too many calls wait.
        """
        self._advance()
        settled = asyncio.Event()
        waiter = self._store.wait(keys, settled.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await settled.wait()
        finally:
            self._store.leave(waiter)
        return self.lookup(keys)

    def acquire(self, lease: Lease, keys: Iterable[bytes]) -> list[BlockSlot]:
        """Lease the longest held prefix of the keys."""
        self._advance()
        return self._store.acquire(lease.id, keys)

    def leased(self, lease_id: str, key: bytes) -> BlockSlot | None:
        """Where a block lies, while the lease keeps it."""
        self._advance()
        return self._store.leased(lease_id, key)

    def keeps(self, lease_id: str, key: bytes, generation: int, slot: int) -> bool:
        """Whether a lease keeps a block at this very place. Any thread may ask, alone of all methods.

        It only looks: each look is one read of a dict, at values that never change. A lease that ends by time is seen
        until the loop has ended it. So the answer may be void at once; the header of the slot tells afterwards.
        """
        place = self._store.leased(lease_id, key)
        return place is not None and (place.block.generation, place.slot) == (generation, slot)

    def require_writer(self, writer: str) -> None:
        """Raise InvalidRequest for a writer without a sign of life of its own: its slots could never be taken back."""
        if writer == self.arena.incarnation or not self.arena.writer_lives(writer):
            raise InvalidRequest("the writer must hold its lock beside the arena", field="writer_id")

    def reserve(self, lease: Lease, writer: str, keys: Sequence[bytes], terms: Terms = ORDINARY) -> Reserved:
        """Give a living writer slots for the keys that are not held and lease the others.

        What was reserved for a writer that is gone is taken back first: nobody would wait for it but in vain.
        """
        now = self._advance()
        for other in self._store.writers_of(keys) - {writer, self.arena.incarnation}:
            if not self.arena.writer_lives(other):
                self._take_back(other)
        reserved = self._store.reserve(lease.id, writer, keys, now, terms)
        for reservation in reserved.slots:
            self.arena.clear(self.layout, reservation)
        self._hasten()
        return reserved

    def commit(self, lease_id: str, blocks: Sequence[WrittenBlock]) -> tuple[BlockRef, ...]:
        """Publish written blocks; answers those that are held and leased now.

        Raises: InvalidRequest, when a checksum is missing.
        """
        if self.layout.checksums and any(block.checksum is None for block in blocks):
            raise InvalidRequest("this node keeps checksums; each block needs one", field="checksum")
        self._advance()
        committed = self._store.commit(lease_id, [block.place for block in blocks])
        checksums = {block.place: block.checksum for block in blocks}
        for place in committed.published:
            self.arena.publish(self.layout, place, checksums[place])
        if self._spool:  # what only its leases see is not kept beyond them
            self._spool.offer(place for place in committed.published if self._store.lookup([place.block.key]))
        return committed.leased

    def abandon(self, reservations: Iterable[Reservation]) -> None:
        """Take slots back whose copies have ended."""
        self._advance()
        self._store.abandon(reservations)

    def keep(self, namespace: str, keys: Sequence[bytes], seconds: float) -> int:
        """Evict held leading blocks of a namespace last, for a while; answers how many."""
        now = self._advance()
        kept = self._store.keep(namespace, keys, seconds, now)
        self._hasten()
        return kept

    def forget(self, namespace: str, keys: Sequence[bytes]) -> int:
        """Evict held blocks of a namespace first; answers how many."""
        self._advance()
        return self._store.forget(namespace, keys)

    def stats(self) -> StoreStats:
        """How full the node is."""
        self._advance()
        return self._store.stats()

    def reclaim(self) -> None:
        """Take back what writers that are gone left in quarantine."""
        self._advance()
        suspects = self._store.quarantined_writers()
        gone = {writer for writer in suspects if not self.arena.writer_lives(writer)}
        for writer in gone:
            self._take_back(writer)
        for writer in suspects - gone - self._late:
            log.warning("a writer is late; its slots wait until its copy ends", extra={"writer": writer})
        self._late = suspects - gone

    def _take_back(self, writer: str) -> None:
        log.info("a writer is gone; its slots return", extra={"writer": writer})
        self._store.writer_gone(writer)
        self.arena.forget_writer(writer)

    async def watch(self) -> None:
        """End what is due when it is due, until cancelled."""
        while True:
            self._sooner.clear()
            self.reclaim()
            ends = [self._store.next_expiry(), self._clock() + LIVENESS_SECONDS if self._late else None]
            self._wake_at = min((end for end in ends if end is not None), default=None)
            wait = None if self._wake_at is None else max(0.0, self._wake_at - self._clock())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._sooner.wait()

    def _advance(self) -> float:
        now = self._clock()
        self._store.expire(now)
        return now

    def _hasten(self) -> None:
        """Wake `watch` when something ends before it would wake by itself."""
        end = self._store.next_expiry()
        if end is not None and (self._wake_at is None or end < self._wake_at):
            self._sooner.set()
