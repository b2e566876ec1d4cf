"""One attempt at a time: a retry ends what it replaces, and an older one does not replace a newer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from twostroke.errors import Superseded
from twostroke.types import RequestContext


@dataclass(slots=True, eq=False)
class _Run:
    attempt: int
    task: asyncio.Task[object]
    superseded: bool = False


class Attempts:
    """The attempts that a worker runs now, by request and choice."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, int], _Run] = {}

    @asynccontextmanager
    async def running(self, context: RequestContext, choice: int = 0) -> AsyncIterator[None]:
        """Run one attempt inside the block.

        An equal or newer attempt of the same choice ends the one that runs: its caller has lost the answer, or will
        not use it. An older one is refused.

        Raises: Superseded.
        """
        task = asyncio.current_task()
        if task is None:  # pragma: no cover - coroutines run in tasks
            raise RuntimeError("attempts are for tasks")
        name, mine = (context.request_id, choice), _Run(context.attempt, task)
        other = self._runs.get(name)
        if other is not None:
            if other.attempt > mine.attempt:
                raise Superseded(f"attempt {other.attempt} of this request is running")
            other.superseded = True
            other.task.cancel()
        self._runs[name] = mine
        try:
            yield
        except asyncio.CancelledError:
            if not mine.superseded:
                raise
            task.uncancel()
            raise Superseded("a newer attempt of this request has begun") from None
        finally:
            if self._runs.get(name) is mine:
                del self._runs[name]
