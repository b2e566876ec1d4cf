"""Breaker: whether Redis is worth asking, and when to try again."""

from __future__ import annotations

import enum
from collections.abc import Callable

MAX_FAILURES = 3  # lookups in a row without an answer
FIRST_PAUSE_SECONDS = 0.25


class State(enum.Enum):
    """What a directory knows of its Redis."""

    STARTING = "starting"  # not yet reached
    UP = "up"
    DOWN = "down"  # only probes reach out; everybody else is answered at once


class Breaker:
    """Opens after failures; callers never pay for the probe that closes it again.

    Pure: takes no clock, and whoever probes sleeps for `pause`. Methods that may change the state say whether they did.

    Args:
        longest: seconds between two probes, at most.
        random: draws from [0, 1).
    """

    def __init__(self, longest: float, random: Callable[[], float]) -> None:
        self.state = State.STARTING
        self._longest = longest
        self._random = random
        self._failures = 0
        self._pauses = 0

    @property
    def up(self) -> bool:
        """Whether to ask."""
        return self.state is State.UP

    def answered(self) -> None:
        """A lookup got its answer."""
        self._failures = 0

    def failed(self) -> bool:
        """A lookup got none; opens after several in a row."""
        self._failures += 1
        return self._failures >= MAX_FAILURES and self.open()

    def open(self) -> bool:
        """Stop asking."""
        return self._change(State.DOWN)

    def close(self) -> bool:
        """A probe or a heartbeat went through.

        Pauses are short again only after the second: a Redis that fails under load alone would otherwise be given up
        and taken back many times a second.
        """
        if self.up:
            self._pauses = 0
        self._failures = 0
        return self._change(State.UP)

    def pause(self) -> float:
        """Seconds to wait before the next probe: twice the last, less up to half, so that nodes do not come at once."""
        seconds = min(FIRST_PAUSE_SECONDS * 2.0**self._pauses, self._longest)
        self._pauses = min(self._pauses + 1, 32)
        return seconds * (1 - self._random() / 2)

    def _change(self, state: State) -> bool:
        changed = self.state is not state
        self.state = state
        return changed
