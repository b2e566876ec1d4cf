"""Deadlines: what ends when, with the next end at hand."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T", int, str)

_SLACK = 64  # outdated heap entries that are not worth a rebuild


class Deadlines(Generic[T]):
    """A bounded heap over things that end at a time. Pure: times are floats in seconds, from any clock.

    Moving or removing a deadline leaves its old entry behind, to be skipped later. When those outnumber the live ones,
    the heap is built again: memory follows what is alive, not how often callers renew.
    """

    def __init__(self) -> None:
        self._ends: dict[T, float] = {}
        self._heap: list[tuple[float, T]] = []

    def __len__(self) -> int:
        return len(self._ends)

    def set(self, thing: T, at: float) -> None:
        """Let `thing` end at `at`, whatever was said before."""
        self._ends[thing] = at
        heapq.heappush(self._heap, (at, thing))
        if len(self._heap) > 2 * len(self._ends) + _SLACK:
            self._heap = [(end, each) for each, end in self._ends.items()]
            heapq.heapify(self._heap)

    def at(self, thing: T) -> float:
        """When `thing` ends. Raises KeyError for one that has no deadline."""
        return self._ends[thing]

    def discard(self, thing: T) -> None:
        """Forget the deadline of `thing`, if it has one."""
        self._ends.pop(thing, None)

    def next(self) -> float | None:
        """The earliest deadline."""
        while self._heap and self._ends.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> list[T]:
        """Remove and return what ends at or before `now`, earliest first."""
        due: list[T] = []
        while (end := self.next()) is not None and end <= now:
            thing = heapq.heappop(self._heap)[1]
            del self._ends[thing]
            due.append(thing)
        return due
