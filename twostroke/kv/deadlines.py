"""Deadlines: what ends when, with the next end at hand; built on Ranking, which keeps the lowest of many at hand."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T", int, str, bytes)

_SLACK = 64  # outdated heap entries that are not worth a rebuild


class Ranking(Generic[T]):
    """A bounded heap over things that each have a number; a change of one costs the logarithm of how many there are.

    Changing or removing a number leaves its old entry behind, to be skipped later. When those outnumber the live ones,
    the heap is built again: memory follows what is alive, not how often callers change their mind.
    """

    def __init__(self) -> None:
        self._ranks: dict[T, float] = {}
        self._heap: list[tuple[float, T]] = []

    def __len__(self) -> int:
        return len(self._ranks)

    def set(self, thing: T, rank: float) -> None:
        """Let `thing` have `rank`, whatever was said before."""
        if self._ranks.get(thing) == rank:
            return
        self._ranks[thing] = rank
        heapq.heappush(self._heap, (rank, thing))
        if len(self._heap) > 2 * len(self._ranks) + _SLACK:
            self._heap = [(each_rank, each) for each, each_rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def at(self, thing: T) -> float:
        """The rank of `thing`. Raises KeyError for one that has none."""
        return self._ranks[thing]

    def discard(self, thing: T) -> None:
        """Forget `thing`, if it has a rank."""
        self._ranks.pop(thing, None)

    def first(self) -> tuple[float, T] | None:
        """The lowest rank and what has it; of equals the least thing."""
        while self._heap and self._ranks.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None


class Deadlines(Ranking[T]):
    """Things that end at a time. Pure: times are floats in seconds, from any clock."""

    def next(self) -> float | None:
        """The earliest deadline."""
        first = self.first()
        return first[0] if first else None

    def pop_due(self, now: float) -> list[T]:
        """Remove and return what ends at or before `now`, earliest first."""
        due: list[T] = []
        while (first := self.first()) is not None and first[0] <= now:
            self.discard(first[1])
            due.append(first[1])
        return due
