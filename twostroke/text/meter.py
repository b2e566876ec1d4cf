"""Meter: what one rendering of a chat template may still cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from jinja2.exceptions import SecurityError

MAX_INTEGER_BITS = 4_096


class LimitExceeded(SecurityError):
    """A template asked for more than its limits allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """Bounds on one rendering. Between two steps a template can only work on values of bounded size."""

    steps: int = 200_000  # turns of loops, bodies of macros, calls
    size: int = 4 << 20  # characters and container items made, all together ...
    growth: int = 16  # ... and so many more for each one given: templates build long texts piece by piece
    seconds: float = 2.0


class Meter:
    """Counts down one rendering's limits; raises LimitExceeded at their end."""

    __slots__ = ("_clock", "_deadline", "_size", "_steps")

    def __init__(self, limits: TemplateLimits, given: object, clock: Callable[[], float]) -> None:
        """Start the time. `given` is what the template is rendered from; `clock` counts seconds."""
        self._steps = limits.steps
        self._size = limits.size + limits.growth * sum(_weights(given))
        self._clock, self._deadline = clock, clock() + limits.seconds

    def step(self) -> None:
        """Count one step, and look at the clock."""
        self._steps -= 1
        if self._steps < 0:
            raise LimitExceeded("the chat template takes too many steps")
        if self._clock() > self._deadline:
            raise LimitExceeded("the chat template takes too long")

    def reserve(self, size: int) -> None:
        """Count `size` characters or items that are about to be made."""
        self._size -= size
        if self._size < 0:
            raise LimitExceeded("the chat template makes too much text")

    def charge(self, value: object) -> None:
        """Count a value that was made, with all it holds: a list that holds another twice counts it twice."""
        for weight in _weights(value):
            self.reserve(weight)


def _weights(value: object) -> Iterator[int]:
    """One number for each string and item in `value`; lazily, since nested lists can stand for endless ones."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield 1 + len(item)
            continue
        if isinstance(item, int) and item.bit_length() > MAX_INTEGER_BITS:
            raise LimitExceeded("the chat template makes too large a number")
        yield 1
        if isinstance(item, Mapping):
            pending += item.keys()
            pending += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            pending += item
