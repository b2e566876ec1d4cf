"""Barrier: callers that wait until blocks are committed, told at the moment when waiting ends or is of no use any more.

Pure bookkeeping, without a clock and without polling: the store says what happens to a key, and that costs a step for
each caller who waits for this very key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from twostroke.errors import Overloaded


class Waiter:
    """One caller, and what it still misses. `wake` is called once: when everything is there, or nothing will come.

    Nothing will come when a missing block's writer has given up and none of the others is being written. A block that
    nobody has begun to write may come yet: its writer may not have got to it.
    """

    def __init__(
        self, keys: frozenset[bytes], missing: set[bytes], written: set[bytes], wake: Callable[[], None]
    ) -> None:
        self.keys = keys
        self._missing = missing
        self._written = written  # of the missing: those somebody is writing
        self._lost: set[bytes] = set()  # of the missing: those somebody was writing, or that were there
        self._wake: Callable[[], None] | None = wake
        self._settle()

    def reserved(self, key: bytes) -> None:
        """Somebody writes the block."""
        self._written.add(key)
        self._lost.discard(key)

    def committed(self, key: bytes) -> None:
        """The block is there."""
        for keys in (self._missing, self._written, self._lost):
            keys.discard(key)
        self._settle()

    def lost(self, key: bytes) -> None:
        """The block is neither there nor being written any more."""
        self._missing.add(key)
        self._written.discard(key)
        self._lost.add(key)
        self._settle()

    def _settle(self) -> None:
        hopeless = self._lost and not self._written
        if self._wake and (not self._missing or hopeless):
            wake, self._wake = self._wake, None
            wake()


class Barrier:
    """All callers that wait, at most `limit` of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiters: set[Waiter] = set()
        self._by_key: dict[bytes, set[Waiter]] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def enter(
        self, keys: Iterable[bytes], missing: Iterable[bytes], written: Iterable[bytes], wake: Callable[[], None]
    ) -> Waiter:
        """Wait for `keys`, of which some are `missing`, and of those some being `written`.

        `wake` is called at once where there is nothing to wait for. Raises Overloaded at the bound on callers.
        """
        if len(self._waiters) >= self._limit:
            raise Overloaded(f"{self._limit} calls wait for blocks", field="at_most")
        waiter = Waiter(frozenset(keys), set(missing), set(written), wake)
        self._waiters.add(waiter)
        for key in waiter.keys:
            self._by_key.setdefault(key, set()).add(waiter)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Stop waiting."""
        self._waiters.discard(waiter)
        for key in waiter.keys:
            waiting = self._by_key[key]
            waiting.discard(waiter)
            if not waiting:
                del self._by_key[key]

    def reserved(self, key: bytes) -> None:
        """Say that a block is being written."""
        for waiter in self._by_key.get(key, ()):
            waiter.reserved(key)

    def committed(self, key: bytes) -> None:
        """Say that a block is there."""
        for waiter in self._by_key.get(key, ()):
            waiter.committed(key)

    def lost(self, key: bytes) -> None:
        """Say that a block is neither there nor being written any more."""
        for waiter in self._by_key.get(key, ()):
            waiter.lost(key)
