"""Deadlines: durations on the wire, points on the loop's clock inside."""

from __future__ import annotations

import asyncio

from twostroke.errors import DeadlineExceeded, InvalidRequest
from twostroke.rpc.interceptor import Context

LONGEST_SECONDS = 86_400.0  # of any call that a client makes


def deadline_of(context: Context, loop: asyncio.AbstractEventLoop) -> float | None:
    """When the call's time is up, on the loop's clock; None when it has no limit."""
    remaining = context.time_remaining()
    return None if remaining is None else loop.time() + remaining


def remaining(deadline: float | None, *, at_most: float) -> float:
    """Seconds left for a call, never more than `at_most`. Raises DeadlineExceeded when none is left."""
    if deadline is None:
        return at_most
    left = deadline - asyncio.get_running_loop().time()
    if left <= 0:
        raise DeadlineExceeded("the request's time is up")
    return min(left, at_most)


def checked_timeout(timeout: float) -> float:
    """A time limit that a client may set, in seconds. Raises InvalidRequest naming it."""
    if not 0 < timeout <= LONGEST_SECONDS:
        raise InvalidRequest(f"timeout must be over 0 and at most {LONGEST_SECONDS:g} s", field="timeout")
    return timeout
