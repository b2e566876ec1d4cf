"""Blocks that this worker moves right now: whoever wants the same ones waits for the end of that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class InFlight:
    """Tasks by the keys of the blocks that they move. A key belongs to the first task that named it, until that ends.

    What a task brought is not told here: whoever waited looks for the block, and moves it itself where it is not there.
    So one that failed, or was cancelled, has successors by itself.
    """

    def __init__(self) -> None:
        self._tasks: dict[bytes, asyncio.Task[Any]] = {}

    @classmethod
    @asynccontextmanager
    async def opened(cls) -> AsyncIterator[InFlight]:
        """Leaving the block waits for every task; each has a time limit of its own."""
        flying = cls()
        try:
            yield flying
        finally:
            if flying._tasks:
                await asyncio.wait(set(flying._tasks.values()))

    def __contains__(self, key: bytes) -> bool:
        return key in self._tasks

    def begin(self, keys: Iterable[bytes], moving: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Move blocks in a task, which is the owner of those keys that have none."""
        task = asyncio.create_task(moving, name="blocks in flight")
        mine = [key for key in keys if key not in self._tasks]
        self._tasks |= dict.fromkeys(mine, task)
        task.add_done_callback(lambda _: self._end(mine))
        return task

    async def ended(self, keys: Iterable[bytes], *, at_most: float) -> bool:
        """Wait, at most so many seconds, for the end of what moves any of the keys.

        A key is waited for once: whoever takes it up after that may be one that waited for it too.

        Returns: whether there was something, and all of it has ended.
        """
        clock = asyncio.get_running_loop().time
        until, left, found = clock() + at_most, set(keys), False
        while moved := left & self._tasks.keys():
            found = True
            _, late = await asyncio.wait({self._tasks[key] for key in moved}, timeout=max(0.0, until - clock()))
            if late:
                return False
            left -= moved
        return found

    def _end(self, keys: list[bytes]) -> None:
        for key in keys:
            del self._tasks[key]
