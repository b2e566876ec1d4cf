"""The gate of a service: counts what is open, refuses what is new while draining, ends what stays too long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from twostroke.errors import Overloaded, Unavailable


class Gate:
    """Every call passes through once. Closing waits for the open ones; expelling ends them with a typed error.

    Args:
        limit: calls that may be open at once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: set[asyncio.Task[object]] = set()
        self._expelled: set[asyncio.Task[object]] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._closing = asyncio.Event()

    @property
    def open_calls(self) -> int:
        """Calls inside now."""
        return len(self._open)

    @property
    def closed(self) -> bool:
        """Whether new calls are refused."""
        return self._closing.is_set()

    async def wait_closed(self) -> None:
        """Return once new calls are refused."""
        await self._closing.wait()

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Hold the gate for one call. Raises Unavailable while draining, Overloaded at the limit.

        A call that is expelled sees Unavailable instead of its cancellation.
        """
        task = asyncio.current_task()
        if task is None:  # pragma: no cover - coroutines run in tasks
            raise RuntimeError("the gate is for tasks")
        if task in self._open:  # a call inside a call counts once, and is no new work
            yield
            return
        if self.closed:
            raise Unavailable("the service is draining and takes no new work", retry_after=1)
        if len(self._open) >= self._limit:
            raise Overloaded(f"{self._limit} calls are open already", retry_after=1)
        self._open.add(task)
        self._empty.clear()
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._expelled:
                raise
            task.uncancel()
            raise Unavailable("the service stopped before the answer was complete", retry_after=1) from None
        finally:
            self._open.discard(task)
            self._expelled.discard(task)
            if not self._open:
                self._empty.set()

    def close(self) -> None:
        """Refuse new calls from now on."""
        self._closing.set()

    async def drained(self, seconds: float) -> bool:
        """Wait until no call is open, at most so long; says whether that came true."""
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def expel(self) -> None:
        """End every open call with Unavailable."""
        for task in tuple(self._open):
            self._expelled.add(task)
            task.cancel()
