"""Namespaces: how the slots of an arena are shared among tenants, and which block goes when one needs room.

A namespace holds a slot from the moment it is given out to be written until it is free again. It never holds more than
its quota: at the quota it gets the slot of a block of its own, or none. While slots are free, anyone below its quota
gets one. When none is, sharing is max-min fair: of those with a block that could go, the namespace that holds most
gives way, but only to one that holds less than it does; otherwise whoever asks gives up a block of its own, or gets
nothing. So a large namespace never pushes out blocks of a smaller one.

Pure. A change of what a namespace holds costs the logarithm of the number of namespaces, a keep that of the number of
kept blocks, all else constant time, amortized. A namespace is known for as long as it holds a slot, so slots bound
their number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from twostroke.kv.deadlines import Deadlines, Ranking
from twostroke.kv.eviction import EvictionQueue


@dataclass(slots=True)
class SpaceCounts:
    """What happened so far."""

    evictions: int = 0
    ghost_hits: int = 0  # blocks that came back soon after their eviction
    quota_refusals: int = 0  # times that a namespace at its quota had nothing to give up
    honoured_keeps: int = 0  # uses of blocks that were kept
    expired_keeps: int = 0  # kept blocks whose time passed


@dataclass(slots=True)
class _Namespace:
    held: int = 0  # slots
    kept: int = 0  # blocks
    queue: EvictionQueue = field(default_factory=EvictionQueue)


class Namespaces:
    """Every namespace that holds a slot.

    Args:
        quota: most slots that one namespace holds.
        keepable: most blocks that one namespace has kept.
    """

    def __init__(self, *, quota: int, keepable: int) -> None:
        self.counts = SpaceCounts()
        self._quota = quota
        self._keepable = keepable
        self._all: dict[str, _Namespace] = {}
        self._largest: Ranking[str] = Ranking()  # by -held: namespaces with a block that could go
        self._kept: dict[bytes, str] = {}  # key -> its namespace
        self._keep_ends: Deadlines[bytes] = Deadlines()

    def __len__(self) -> int:
        return len(self._all)

    @property
    def kept(self) -> int:
        """Blocks that are kept now."""
        return len(self._kept)

    @property
    def evictable(self) -> int:
        """Blocks that could go now."""
        return sum(len(each.queue) for each in self._all.values())

    def held(self, name: str) -> int:
        """Slots that a namespace holds."""
        return self._all[name].held if name in self._all else 0

    def may_grow(self, name: str) -> bool:
        """Whether a namespace is below its quota."""
        return self.held(name) < self._quota

    def take(self, name: str) -> None:
        """Note that a namespace holds a slot more."""
        space = self._all.setdefault(name, _Namespace())
        space.held += 1
        self._rank(name, space)

    def give(self, name: str) -> None:
        """Note that a namespace holds a slot less; one without any is forgotten."""
        space = self._all[name]
        space.held -= 1
        self._rank(name, space)
        if not space.held:
            del self._all[name]

    def evict_for(self, name: str) -> bytes | None:
        """Give up a block so that a namespace may have its slot; None when nothing may go for it."""
        if self.may_grow(name):
            first = self._largest.first()
            larger = first is not None and -first[0] > self.held(name)
            return self._evict(first[1] if first and larger else name)
        key = self._evict(name)
        self.counts.quota_refusals += key is None
        return key

    def add(self, name: str, key: bytes) -> None:
        """Note a committed block, in a slot that its namespace holds already."""
        space = self._all[name]
        self.counts.ghost_hits += space.queue.add(key)
        self._rank(name, space)

    def pin(self, name: str, key: bytes) -> None:
        """Note that a block without a lease has one now."""
        space = self._all[name]
        space.queue.pin(key)
        self._rank(name, space)

    def unpin(self, name: str, key: bytes) -> None:
        """Note that a block's last lease has ended."""
        space = self._all[name]
        space.queue.unpin(key)
        self._rank(name, space)

    def use(self, name: str, key: bytes) -> None:
        """Note that a lease took a block that was there."""
        self.counts.honoured_keeps += key in self._kept
        self._all[name].queue.use(key)

    def keep(self, name: str, keys: Iterable[bytes], until: float) -> int:
        """Let blocks go last, each at least until then; answers for how many leading ones there was room."""
        leading = []
        for key in keys:
            if key not in self._kept:
                space = self._all[name]
                if space.kept >= self._keepable:
                    break
                space.kept += 1
                self._kept[key] = name
                self._keep_ends.set(key, until)
            leading.append(key)
        for key in reversed(leading):  # as at the end of a lease: the ends of prompts go first, also when time is up
            self._all[name].queue.keep(key)
            self._keep_ends.set(key, max(until, self._keep_ends.at(key)))
        return len(leading)

    def unkeep(self, key: bytes) -> None:
        """Let a block go like any other; nothing changes for one that is not kept."""
        if key in self._kept:
            self._all[self._drop_keep(key)].queue.unkeep(key)

    def forget(self, name: str, key: bytes) -> bool:
        """Let a block without a lease go first, kept or not; answers whether it will."""
        self.unkeep(key)
        return self._all[name].queue.forget(key)

    def expire(self, now: float) -> None:
        """End keeps whose time has passed."""
        for key in self._keep_ends.pop_due(now):
            self.unkeep(key)
            self.counts.expired_keeps += 1

    def next_expiry(self) -> float | None:
        """When `expire` has something to do next."""
        return self._keep_ends.next()

    def _evict(self, name: str) -> bytes | None:
        space = self._all.get(name)
        key = space.queue.evict() if space else None
        if key is None:
            return None
        self.counts.evictions += 1
        if key in self._kept:
            self._drop_keep(key)
        self.give(name)
        return key

    def _drop_keep(self, key: bytes) -> str:
        name = self._kept.pop(key)
        self._keep_ends.discard(key)
        self._all[name].kept -= 1
        return name

    def _rank(self, name: str, space: _Namespace) -> None:
        if len(space.queue):
            self._largest.set(name, -space.held)
        else:
            self._largest.discard(name)
