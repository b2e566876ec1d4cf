"""Patience with the store: what it would save can be computed too, so waiting for it must leave the time to compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHARE = 0.25  # of the time that a request has left, for all transfers of one stage


class Patience:
    """How long one stage of a request waits for transfers. Pure: times are floats in seconds, from any clock.

    Args:
        deadline: of the request; None leaves it to the limits of each call.
        clock: now.
    """

    def __init__(self, deadline: float | None, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = None if deadline is None else SHARE * (deadline - clock())

    @contextmanager
    def waiting(self) -> Iterator[float | None]:
        """Give the deadline of what is waited for inside the block, whose time is used up."""
        if self._left is None:
            yield None
            return
        began = self._clock()
        try:
            yield began + self._left
        finally:
            self._left -= self._clock() - began
