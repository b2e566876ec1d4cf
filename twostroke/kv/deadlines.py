"""Deadlines: what ends when, with the next end at hand; built on Ranking, which keeps the lowest of many at hand."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

_SLACK = 64  # outdated heap entries that are not worth a rebuild


class Ranking(Generic[T]):
    """A bounded heap over things that each have a number; a change of one costs the logarithm of how many there are.

    Changing or removing a number leaves its old entry behind, to be skipped later. When those outnumber the live ones,
    the heap is built again: memory follows what is alive, not how often callers change their mind.
    """

    def __init__(self) -> None:
        self._ranks: dict[T, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, T]] = []
        self._set = 0  # how often; of equal ranks the one that was set first comes first

    def __len__(self) -> int:
        return len(self._ranks)

    def set(self, thing: T, rank: float) -> None:
        """Let `thing` have `rank`, whatever was said before."""
        if thing in self._ranks and self._ranks[thing][0] == rank:
            return
        self._set += 1
        self._ranks[thing] = rank, self._set
        heapq.heappush(self._heap, (rank, self._set, thing))
        if len(self._heap) > 2 * len(self._ranks) + _SLACK:
            self._heap = [(*each_rank, each) for each, each_rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def at(self, thing: T) -> float:
        """The rank of `thing`. Raises KeyError for one that has none."""
        return self._ranks[thing][0]

    def discard(self, thing: T) -> None:
        """Forget `thing`, if it has a rank."""
        self._ranks.pop(thing, None)

    def first(self) -> tuple[float, T] | None:
        """The lowest rank, and what has it."""
        while self._heap:
            rank, order, thing = self._heap[0]
            if self._ranks.get(thing) == (rank, order):
                return rank, thing
            heapq.heappop(self._heap)
        return None


class Deadlines(Ranking[T]):
    """Things that end at a time. Pure: times are floats in seconds, from any clock."""

    def next(self) -> float | None:
        """The earliest deadline."""
        first = self.first()
        return first[0] if first else None

    def pop_due(self, now: float) -> list[T]:
        """Remove and return what ends at or before `now`, earliest first, and of equals what was set first."""
        due: list[T] = []
        while (first := self.first()) is not None and first[0] <= now:
            self.discard(first[1])
            due.append(first[1])
        return due
