"""A block store in the plainest words, to judge the real one by: what lies in each slot, and who gives way to whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from twostroke.kv.limits import StoreLimits
from twostroke.kv.refs import BlockSlot, Reservation, Terms


@dataclass(slots=True)
class Copy:
    """A slot that somebody may be writing to."""

    reservation: Reservation
    writer: str
    terms: Terms
    until: float


@dataclass(slots=True)
class Lying:
    """A committed block."""

    place: BlockSlot
    namespace: str
    transient: bool
    kept_until: float = 0.0
    forgotten: bool = False

    @property
    def key(self) -> bytes:
        return self.place.block.key


class StoreModel:
    """Learns from the store's answers what lies where, and judges each of them."""

    def __init__(self, slots: int, limits: StoreLimits) -> None:
        self.now = 0.0
        self.slots = slots
        self.quota = int(limits.namespace_share * slots)
        self.keepable = int(limits.keep_share * self.quota)
        self.reservation_seconds = limits.reservation_seconds
        self.keep_seconds = limits.keep_seconds
        self.copying: dict[int, Copy] = {}  # by slot
        self.lying: dict[int, Lying] = {}  # by slot
        self.ends: dict[str, float] = {}
        self.keeps: dict[str, set[BlockSlot]] = {}
        self.evictions = self.expired = 0

    def alive(self, lease: str) -> bool:
        return self.ends.get(lease, 0.0) > self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.end(lease for lease in list(self.ends) if not self.alive(lease))
        for each in self.lying.values():
            if 0.0 < each.kept_until <= self.now:
                each.kept_until, self.expired = 0.0, self.expired + 1

    def end(self, leases: Iterable[str]) -> None:
        for lease in leases:
            self.ends.pop(lease, None)
            self.keeps.pop(lease, None)
        for slot in [slot for slot, each in self.lying.items() if each.transient and not self.leased(each)]:
            del self.lying[slot]

    def leased(self, block: Lying) -> bool:
        return any(block.place in places for places in self.keeps.values())

    def find(self, key: bytes) -> Lying | None:
        return next((each for each in self.lying.values() if each.key == key), None)

    def written(self, key: bytes) -> Copy | None:
        copies = (each for each in self.copying.values() if each.reservation.key == key)
        return next((each for each in copies if each.until > self.now), None)

    def sees(self, key: bytes, lease: str = "") -> bool:
        block = self.find(key)
        return block is not None and (not block.transient or block.place in self.keeps.get(lease, ()))

    def held(self, namespace: str) -> int:
        writing = sum(each.terms.namespace == namespace for each in self.copying.values())
        return writing + sum(each.namespace == namespace for each in self.lying.values())

    def could_go(self, namespace: str | None = None) -> list[Lying]:
        blocks = [each for each in self.lying.values() if not each.transient and not self.leased(each)]
        return [each for each in blocks if namespace in (None, each.namespace)]

    def used(self, lease: str, places: Iterable[BlockSlot]) -> None:
        """Blocks that a lease found."""
        for place in places:
            if place not in self.keeps[lease]:
                self.lying[place.slot].forgotten = False
                self.keeps[lease].add(place)

    def made_ordinary(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if block := self.find(key):
                block.transient = False
            elif copy := self.written(key):
                copy.terms = replace(copy.terms, transient=False)

    def given(self, reservation: Reservation, writer: str, terms: Terms) -> None:
        """Judge that a writer was given this slot."""
        mine = terms.namespace
        assert reservation.slot not in self.copying  # nobody else may still be writing there
        victim = self.lying.pop(reservation.slot, None)
        if victim is not None:
            self.lying[reservation.slot] = victim
            self._judge(victim, mine)
            del self.lying[reservation.slot]
            self.evictions += 1
        until = self.now + self.reservation_seconds
        self.copying[reservation.slot] = Copy(reservation, writer, terms, until)
        assert self.held(mine) <= self.quota

    def _judge(self, victim: Lying, mine: str) -> None:
        assert not self.leased(victim)
        assert not victim.transient
        rivals = self.could_go(victim.namespace)
        if victim.kept_until:
            assert all(each.kept_until for each in rivals)
        if any(each.forgotten for each in rivals):
            assert victim.forgotten
        largest = max(self.held(each.namespace) for each in self.could_go())
        if self.held(mine) >= self.quota:
            assert victim.namespace == mine
        elif victim.namespace == mine:
            assert self.free == 0
            assert self.held(mine) >= largest
        else:
            assert self.free == 0
            assert self.held(victim.namespace) == largest > self.held(mine)

    def refused(self, namespace: str) -> None:
        """Judge that a namespace got no slot."""
        assert not self.could_go(namespace)
        if self.held(namespace) < self.quota:
            assert self.free == 0
            assert all(self.held(each.namespace) <= self.held(namespace) for each in self.could_go())

    @property
    def free(self) -> int:
        return self.slots - len(self.copying) - len(self.lying)
