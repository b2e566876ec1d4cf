"""Meter: what one rendering of a chat template may still cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from jinja2.exceptions import SecurityError

MAX_INTEGER_BITS = 4_096


class LimitExceeded(SecurityError):
    """A template asked for more than its limits allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """Bounds on one rendering. Between two steps a template can only work on values of bounded size."""

    steps: int = 200_000  # turns of loops, bodies of macros, calls
    size: int = 16 << 20  # characters and container items made, all together
    seconds: float = 2.0


class Meter:
    """Counts down one rendering's limits; raises LimitExceeded at their end."""

    __slots__ = ("_clock", "_deadline", "_size", "_steps")

    def __init__(self, limits: TemplateLimits, clock: Callable[[], float]) -> None:
        self._steps, self._size = limits.steps, limits.size
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
        pending = [iter((value,))]
        while pending:
            item = next(pending[-1], pending)  # the stack itself marks an iterator's end
            if item is pending:
                pending.pop()
            elif isinstance(item, str):
                self.reserve(1 + len(item))
            elif isinstance(item, int) and item.bit_length() > MAX_INTEGER_BITS:
                raise LimitExceeded("the chat template makes too large a number")
            else:
                self.reserve(1)
                if children := _children(item):
                    pending.append(iter(children))


def _children(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return [each for pair in islice(value.items(), None) for each in pair]
    return value if isinstance(value, list | tuple | set | frozenset) else ()
