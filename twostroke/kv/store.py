"""BlockStore: which slot holds which block, who may write it, and who keeps it.

A slot is in exactly one state:

    free         nobody uses it
    reserved     a writer may copy a block into it until the reservation's deadline
    quarantined  that deadline has passed, but the writer may still be copying: nobody gets the slot until the writer
                 says that the copy ended (a late commit, or abandon) or is known to be gone
    committed    its block may be read. Under a lease it stays; otherwise it is evictable, least recently used first

Pure bookkeeping: no clock (times are floats in seconds that never run backwards), no socket, no bytes. Before any other
call the owner calls `expire`, so that what has ended is never seen as alive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from twostroke.errors import NotFound, Overloaded
from twostroke.kv.deadlines import Deadlines
from twostroke.kv.refs import BlockRef, BlockSlot, Reservation


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Bounds on what callers can multiply. Slots bound blocks and reservations."""

    leases: int = 4_096
    lease_blocks: int = 65_536
    lease_seconds: float = 60.0
    reservation_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Reserved:
    """What a writer was given: slots to fill, and blocks that are held already and leased now."""

    slots: tuple[Reservation, ...]
    held: tuple[BlockSlot, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """What a commit changed: blocks that became readable by it, and those of its blocks that are leased now."""

    published: tuple[BlockSlot, ...]
    leased: tuple[BlockRef, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """How full the store is. free + reserved + quarantined + committed = slots."""

    slots: int
    free: int
    reserved: int
    quarantined: int
    committed: int
    leased_blocks: int  # committed blocks under at least one lease
    leases: int


@dataclass(slots=True)
class _Block:
    place: BlockSlot
    leases: int = 0


@dataclass(frozen=True, slots=True)
class _Claim:
    """A reservation and whose it is."""

    reservation: Reservation
    writer: str


@dataclass(slots=True)
class _Lease:
    blocks: dict[bytes, _Block] = field(default_factory=dict)  # in prompt order, as they joined


class BlockStore:
    """The state of `slots` slots. Every method takes time in proportion to its arguments and what they end."""

    def __init__(self, slots: int, limits: StoreLimits) -> None:
        self._limits = limits
        self._free = deque(range(slots))
        self._generations = [0] * slots
        self._claims: dict[int, _Claim] = {}  # by slot: reserved and quarantined
        self._reserved: dict[bytes, int] = {}  # key -> slot, while the deadline has not passed
        self._blocks: dict[bytes, _Block] = {}  # committed
        self._evictable: dict[bytes, None] = {}  # committed without a lease, least recently used first
        self._leases: dict[str, _Lease] = {}
        self._lease_ends: Deadlines[str] = Deadlines()
        self._reservation_ends: Deadlines[int] = Deadlines()

    def open_lease(self, lease_id: str, seconds: float, now: float) -> float:
        """Open an empty lease under a new id; answers for how long. Raises Overloaded at the bound on leases."""
        if len(self._leases) >= self._limits.leases:
            wait = max(0.0, (self._lease_ends.next() or now) - now)
            raise Overloaded(f"{self._limits.leases} leases are open", field="lease_id", retry_after=wait)
        self._leases[lease_id] = _Lease()
        granted = min(seconds, self._limits.lease_seconds)
        self._lease_ends.set(lease_id, now + granted)
        return granted

    def prolong(self, lease_id: str, seconds: float, now: float) -> float:
        """Let a lease live for `seconds` from now, or longer if it would anyway; answers the seconds granted.

        Raises: NotFound, when the lease has ended.
        """
        self._lease(lease_id)
        granted = min(seconds, self._limits.lease_seconds)
        self._lease_ends.set(lease_id, max(self._lease_ends.at(lease_id), now + granted))
        return granted

    def renew(self, lease_ids: Iterable[str], seconds: float, now: float) -> list[str]:
        """Prolong each lease that is alive; answers which ones are."""
        alive = [lease_id for lease_id in lease_ids if lease_id in self._leases]
        for lease_id in alive:
            self.prolong(lease_id, seconds, now)
        return alive

    def release(self, lease_ids: Iterable[str]) -> None:
        """End leases; those that have ended are left alone."""
        for lease_id in lease_ids:
            self._lease_ends.discard(lease_id)
            self._end_lease(lease_id)

    def lookup(self, keys: Iterable[bytes]) -> int:
        """How many leading keys are held. Never pins, never counts as a use."""
        held = 0
        for key in keys:
            if key not in self._blocks:
                break
            held += 1
        return held

    def acquire(self, lease_id: str, keys: Iterable[bytes]) -> list[BlockSlot]:
        """Lease the longest held prefix of the keys, as far as the lease has room.

        Raises: NotFound, when the lease has ended.
        """
        lease, places = self._lease(lease_id), []
        for key in keys:
            block = self._blocks.get(key)
            if block is None or not self._join(lease, block):
                break
            places.append(block.place)
        return places

    def leased(self, lease_id: str, key: bytes) -> BlockSlot | None:
        """Where a block lies, while the lease keeps it."""
        lease = self._leases.get(lease_id)
        block = lease.blocks.get(key) if lease else None
        return block.place if block else None

    def reserve(self, lease_id: str, writer: str, keys: Sequence[bytes], now: float) -> Reserved:
        """Lease what is held of the keys and give `writer` slots for what is not.

        Never waits: at the first key for which nothing can be evicted the rest gets nothing. A key that is reserved
        already is left to its first writer.

        Raises: NotFound, when the lease has ended.
        """
        lease = self._lease(lease_id)
        # Held blocks join first, or making room for one key could evict another of the same prompt.
        held = [block.place for key in keys if (block := self._blocks.get(key)) and self._join(lease, block)]
        slots = []
        for key in keys:
            if key in self._blocks or key in self._reserved:
                continue
            slot = self._take_slot()
            if slot is None:
                break
            slots.append(self._claim(slot, key, writer, now))
        return Reserved(tuple(slots), tuple(held))

    def commit(self, lease_id: str, blocks: Iterable[BlockSlot]) -> Committed:
        """Make written blocks readable and lease them. Idempotent.

        Without its lease, which may have ended, a block is published all the same: it is true for anyone. One whose
        reservation was quarantined is not, and its slot is free now: this call says that the copy has ended.
        """
        lease, published, leased = self._leases.get(lease_id), [], []
        for place in blocks:
            if self._settle(place):
                published.append(place)
            block = self._blocks.get(place.block.key)
            if block and block.place == place and lease and self._join(lease, block):
                leased.append(place.block)
        return Committed(tuple(published), tuple(leased))

    def abandon(self, reservations: Iterable[Reservation]) -> None:
        """Take slots back whose copies have ended with nothing to show. Idempotent."""
        for reservation in reservations:
            claim = self._claims.get(reservation.slot)
            if claim and claim.reservation == reservation:
                self._drop_claim(reservation)
                self._free.append(reservation.slot)

    def expire(self, now: float) -> None:
        """End leases, and quarantine reservations, whose time has come."""
        for lease_id in self._lease_ends.pop_due(now):
            self._end_lease(lease_id)
        for slot in self._reservation_ends.pop_due(now):
            del self._reserved[self._claims[slot].reservation.key]

    def next_expiry(self) -> float | None:
        """When `expire` has something to do next."""
        ends = [end for end in (self._lease_ends.next(), self._reservation_ends.next()) if end is not None]
        return min(ends, default=None)

    def quarantined_writers(self) -> set[str]:
        """Writers that slots are quarantined for."""
        return {claim.writer for claim in self._claims.values() if not self._is_reserved(claim.reservation)}

    def writer_gone(self, writer: str) -> None:
        """Take back every slot reserved or quarantined for a writer that can no longer be copying."""
        self.abandon([claim.reservation for claim in self._claims.values() if claim.writer == writer])

    def stats(self) -> StoreStats:
        """Count the slots by state."""
        return StoreStats(
            slots=len(self._generations),
            free=len(self._free),
            reserved=len(self._reserved),
            quarantined=len(self._claims) - len(self._reserved),
            committed=len(self._blocks),
            leased_blocks=len(self._blocks) - len(self._evictable),
            leases=len(self._leases),
        )

    def _lease(self, lease_id: str) -> _Lease:
        lease = self._leases.get(lease_id)
        if lease is None:
            raise NotFound("the lease has ended", field="lease_id")
        return lease

    def _join(self, lease: _Lease, block: _Block) -> bool:
        """Put a block under a lease; False when the lease has no room."""
        key = block.place.block.key
        if key in lease.blocks:
            return True
        if len(lease.blocks) >= self._limits.lease_blocks:
            return False
        lease.blocks[key] = block
        block.leases += 1
        self._evictable.pop(key, None)
        return True

    def _end_lease(self, lease_id: str) -> None:
        lease = self._leases.pop(lease_id, None)
        # Last block first: a block is of no use without those before it, so the ends of prompts are evicted first.
        for key, block in reversed(lease.blocks.items() if lease else ()):
            block.leases -= 1
            if not block.leases:
                self._evictable[key] = None

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.popleft()
        key = next(iter(self._evictable), None)
        if key is None:
            return None
        del self._evictable[key]
        return self._blocks.pop(key).place.slot

    def _claim(self, slot: int, key: bytes, writer: str, now: float) -> Reservation:
        self._generations[slot] += 1  # from here on a reader that is still copying the old block will notice
        reservation = Reservation(key, self._generations[slot], slot)
        self._claims[slot] = _Claim(reservation, writer)
        self._reserved[key] = slot
        self._reservation_ends.set(slot, now + self._limits.reservation_seconds)
        return reservation

    def _settle(self, place: BlockSlot) -> bool:
        """End the reservation behind a written block; True when the block is readable by it."""
        reservation = Reservation(place.block.key, place.block.generation, place.slot)
        claim = self._claims.get(place.slot)
        if not claim or claim.reservation != reservation:
            return False
        if not self._is_reserved(reservation):
            self.abandon([reservation])
            return False
        self._drop_claim(reservation)
        self._blocks[reservation.key] = _Block(place)
        self._evictable[reservation.key] = None
        return True

    def _drop_claim(self, reservation: Reservation) -> None:
        if self._is_reserved(reservation):
            del self._reserved[reservation.key]
        self._reservation_ends.discard(reservation.slot)
        del self._claims[reservation.slot]

    def _is_reserved(self, reservation: Reservation) -> bool:
        return self._reserved.get(reservation.key) == reservation.slot
