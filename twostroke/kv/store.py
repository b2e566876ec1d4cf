"""BlockStore: which slot holds which block, who may write it, and who keeps it.

A slot is in exactly one state:

    free         nobody uses it
    reserved     a writer may copy a block into it until the reservation's deadline
    quarantined  that deadline has passed, but the writer may still be copying: nobody gets the slot until the writer
                 says that the copy ended (a late commit, or abandon) or is known to be gone
    committed    its block may be read. Under a lease it stays; otherwise it is evictable

Each idea has a file: `claims` are slots that are being written, `leases` keep blocks, `held` knows the committed ones
and who sees them, `namespaces` says for whom one is evicted and `eviction` which one, `barrier` tells those who wait.

Pure bookkeeping: no clock (times are floats in seconds that never run backwards), no socket, no bytes. Before any other
call the owner calls `expire`, so that what has ended is never seen as alive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from twostroke.kv.barrier import Barrier, Waiter
from twostroke.kv.claims import Claim, Claims
from twostroke.kv.held import HeldBlocks, News, NoNews
from twostroke.kv.leases import Block, Leases
from twostroke.kv.limits import StoreLimits, StoreStats
from twostroke.kv.namespaces import Namespaces
from twostroke.kv.refs import ORDINARY, BlockRef, BlockSlot, Reservation, Terms


@dataclass(frozen=True, slots=True)
class Reserved:
    """What a writer was given: slots to fill, blocks that are held already and leased now, keys left to another."""

    slots: tuple[Reservation, ...]
    held: tuple[BlockSlot, ...]
    writing: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Committed:
    """What a commit changed: blocks that became readable by it, and those of its blocks that are leased now."""

    published: tuple[BlockSlot, ...]
    leased: tuple[BlockRef, ...]


class BlockStore:
    """The state of `slots` slots.

    Every method takes time in proportion to its arguments and what they end, times the logarithm of what there is.

    Args:
        news: is told of ordinary blocks, as they come and go.
    """

    def __init__(self, slots: int, limits: StoreLimits, news: News | None = None) -> None:
        self._limits = limits
        self._slots = slots
        self._free = deque(range(slots))
        self._claims = Claims(slots)
        self._leases = Leases(limit=limits.leases, blocks=limits.lease_blocks, seconds=limits.lease_seconds)
        quota = max(1, int(limits.namespace_share * slots))
        self._spaces = Namespaces(quota=quota, keepable=int(limits.keep_share * quota))
        self._held = HeldBlocks(self._spaces, news or NoNews())
        self._barrier = Barrier(limits.waiting)

    def open_lease(self, lease_id: str, seconds: float, now: float) -> float:
        """Open an empty lease under a new id; answers for how long. Raises Overloaded at the bound on leases."""
        return self._leases.open(lease_id, seconds, now)

    def prolong(self, lease_id: str, seconds: float, now: float) -> float:
        """Let a lease live for `seconds` from now, or longer if it would anyway; answers the seconds granted.

        Raises: NotFound, when the lease has ended.
        """
        return self._leases.prolong(lease_id, seconds, now)

    def renew(self, lease_ids: Iterable[str], seconds: float, now: float) -> list[str]:
        """Prolong each lease that is alive; answers which ones are."""
        alive = [lease_id for lease_id in lease_ids if lease_id in self._leases]
        for lease_id in alive:
            self._leases.prolong(lease_id, seconds, now)
        return alive

    def release(self, lease_ids: Iterable[str]) -> None:
        """End leases; those that have ended are left alone."""
        for lease_id in lease_ids:
            for block in self._leases.end(lease_id):
                self._unleased(block)

    def lookup(self, keys: Iterable[bytes], lease_id: str = "") -> int:
        """How many leading keys are held, as seen under a lease if it is alive. Never pins, never counts as a use."""
        return self._held.count(keys, self._leases.get(lease_id))

    def acquire(self, lease_id: str, keys: Iterable[bytes]) -> list[BlockSlot]:
        """Lease the longest held prefix of the keys, as far as the lease has room.

        Raises: NotFound, when the lease has ended.
        """
        lease, places = self._leases.require(lease_id), []
        for key in keys:
            block = self._held.seen(key, lease)
            if block is None or not self._held.join(lease, block, used=True):
                break
            places.append(block.place)
        return places

    def leased(self, lease_id: str, key: bytes) -> BlockSlot | None:
        """Where a block lies, while the lease keeps it."""
        lease = self._leases.get(lease_id)
        block = lease.blocks.get(key) if lease else None
        return block.place if block else None

    def reserve(
        self, lease_id: str, writer: str, keys: Sequence[bytes], now: float, terms: Terms = ORDINARY
    ) -> Reserved:
        """Lease what is held of the keys and give `writer` slots for what is not.

        Never waits: at the first key for which nothing may be evicted the rest gets nothing. A key that is reserved
        already is left to its first writer. A block that shall stay does, though it is held, or being written, on terms
        that say otherwise.

        Raises: NotFound, when the lease has ended.
        """
        lease, join = self._leases.require(lease_id), self._held.join
        if not terms.transient:
            self._make_ordinary(keys)
        # Held blocks join first, or making room for one key could evict another of the same prompt.
        held = [block.place for key in keys if (block := self._held.get(key)) and join(lease, block, used=True)]
        slots: list[Reservation] = []
        writing = [key for key in keys if self._claims.of_key(key)]
        for key in keys:
            if self._held.get(key) or self._claims.of_key(key):
                continue
            slot = self._take_slot(terms.namespace)
            if slot is None:
                break
            slots.append(self._claims.add(slot, key, writer, terms, now + self._limits.reservation_seconds))
            self._barrier.reserved(key)
        return Reserved(tuple(slots), tuple(held), tuple(writing))

    def commit(self, lease_id: str, blocks: Iterable[BlockSlot]) -> Committed:
        """Make written blocks readable and lease them. Idempotent.

        Without its lease, which may have ended, an ordinary block is published all the same: it is true for anyone; a
        transient one is dropped. One whose reservation was quarantined is not published, and its slot is free now: this
        call says that the copy has ended.
        """
        lease, published, leased = self._leases.get(lease_id), [], []
        for place in blocks:
            claim = self._claims.find(Reservation(place.block.key, place.block.generation, place.slot))
            block = self._settle(claim, place) if claim else self._held.get(place.block.key)
            if block is None or block.place != place:
                continue
            if lease and self._held.join(lease, block, used=False):
                leased.append(place.block)
            elif claim and claim.terms.transient:
                self._unleased(block)
                continue
            if claim:
                published.append(place)
        return Committed(tuple(published), tuple(leased))

    def abandon(self, reservations: Iterable[Reservation]) -> None:
        """Take slots back whose copies have ended with nothing to show. Idempotent."""
        for reservation in reservations:
            if claim := self._claims.find(reservation):
                self._give_up(claim)

    def keep(self, namespace: str, keys: Iterable[bytes], seconds: float, now: float) -> int:
        """Evict held leading blocks of a namespace after all its others, for so long; answers how many.

        Bounded in number and time; never shortens. 0 seconds end it, for every key.
        """
        if seconds > 0:
            return self._held.keep(namespace, keys, now + min(seconds, self._limits.keep_seconds))
        self._held.unkeep(namespace, keys)
        return 0

    def forget(self, namespace: str, keys: Sequence[bytes]) -> int:
        """Evict held blocks of a namespace before all its others, unless a lease keeps them; answers how many."""
        return self._held.forget(namespace, keys)

    def wait(self, keys: Sequence[bytes], wake: Callable[[], None]) -> Waiter:
        """Have `wake` called once, when all keys are held or there is nothing more to wait for: see `Waiter`.

        The caller gives the waiter to `leave` when it is done. Raises Overloaded, when too many wait.
        """
        missing = [key for key in keys if key not in self._held]
        return self._barrier.enter(keys, missing, [key for key in missing if self._claims.of_key(key)], wake)

    def leave(self, waiter: Waiter) -> None:
        """Let a waiter go."""
        self._barrier.leave(waiter)

    def expire(self, now: float) -> None:
        """End leases and keeps, and quarantine reservations, whose time has come."""
        self.release(self._leases.pop_due(now))
        for key in self._claims.expire(now):
            self._barrier.lost(key)
        self._spaces.expire(now)

    def next_expiry(self) -> float | None:
        """When `expire` has something to do next."""
        ends = (self._leases.next_expiry(), self._claims.next_expiry(), self._spaces.next_expiry())
        return min((end for end in ends if end is not None), default=None)

    def writers_of(self, keys: Iterable[bytes]) -> set[str]:
        """Writers that have reserved some of the keys."""
        return {claim.writer for key in keys if (claim := self._claims.of_key(key))}

    def quarantined_writers(self) -> set[str]:
        """Writers that slots are quarantined for."""
        return self._claims.late_writers()

    def writer_gone(self, writer: str) -> None:
        """Take back every slot reserved or quarantined for a writer that can no longer be copying."""
        self.abandon(self._claims.of_writer(writer))

    def stats(self) -> StoreStats:
        """Count the slots by state, and everything else."""
        counts = self._spaces.counts
        return StoreStats(
            slots=self._slots,
            free=len(self._free),
            reserved=self._claims.reserved,
            quarantined=self._claims.quarantined,
            committed=len(self._held),
            leased_blocks=len(self._held) - self._spaces.evictable,
            leases=len(self._leases),
            transient=self._held.transient,
            kept=self._spaces.kept,
            namespaces=len(self._spaces),
            waiting=len(self._barrier),
            evictions=counts.evictions,
            ghost_hits=counts.ghost_hits,
            quota_refusals=counts.quota_refusals,
            honoured_keeps=counts.honoured_keeps,
            expired_keeps=counts.expired_keeps,
        )

    def _make_ordinary(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if self._held.make_ordinary(key):
                self._barrier.committed(key)
            elif claim := self._claims.of_key(key):
                claim.terms = replace(claim.terms, transient=False)

    def _take_slot(self, namespace: str) -> int | None:
        """A slot that the namespace holds from now on."""
        if self._free and self._spaces.may_grow(namespace):
            slot = self._free.popleft()
        else:
            block = self._held.evict_for(namespace)
            if block is None:
                return None
            self._barrier.lost(block.key)
            slot = block.place.slot
        self._spaces.take(namespace)
        return slot

    def _settle(self, claim: Claim, place: BlockSlot) -> Block | None:
        """End the claim behind a written block; the block, when it is readable by it."""
        if not self._claims.is_reserved(claim):
            self._give_up(claim)
            return None
        self._claims.drop(claim)
        block = Block(place, claim.terms.namespace)
        self._held.add(block, transient=claim.terms.transient)
        if claim.terms.transient:
            self._barrier.lost(block.key)  # nobody but its leases will see it
        else:
            self._barrier.committed(block.key)
        return block

    def _unleased(self, block: Block) -> None:
        if self._held.unleased(block):
            self._give_back(block.place.slot, block.namespace)

    def _give_up(self, claim: Claim) -> None:
        if self._claims.is_reserved(claim):
            self._barrier.lost(claim.reservation.key)
        self._claims.drop(claim)
        self._give_back(claim.reservation.slot, claim.terms.namespace)

    def _give_back(self, slot: int, namespace: str) -> None:
        self._free.append(slot)
        self._spaces.give(namespace)
