"""Calls that may be left at any moment: who leaves ends the call, and lets gRPC finish what it has begun for it.

grpc.aio frees what an operation took from the heap only where the task that waits for it sees its end. Cancelling that
task loses 80 bytes for each part of the operation, up to a kilobyte a call, for good: a router whose callers leave
would grow for as long as it lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Generator
from typing import Any, TypeVar

import grpc

T = TypeVar("T")
_LEFT = "the caller left"


class KeptCall:
    """A call with one request and an answer or a stream of them, in the words of grpc.aio's own."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._whole(self._call).__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            while (message := await self.read()) is not grpc.aio.EOF:
                yield message
        finally:
            self.cancel()

    async def read(self) -> Any:
        """Return the next message, or EOF. Raises AioRpcError; CancelledError, when the call was."""
        return await self._whole(self._call.read())

    def cancel(self) -> bool:
        """End the call; says whether it had not ended before."""
        if self._call.done():
            return False
        self._call._cython_call.cancel(_LEFT)  # `_call.cancel` would cancel the tasks that wait for operations too
        return True

    async def _whole(self, operation: Awaitable[T]) -> T:
        """Await an operation to its end; whoever is cancelled meanwhile ends the call, and with it the operation."""
        doing = asyncio.ensure_future(operation)
        doing.add_done_callback(_retrieve)  # whoever is cancelled in the moment in which it fails does not hear of that
        try:
            return await asyncio.shield(doing)
        except asyncio.CancelledError:
            self.cancel()
            if not doing.done():
                await asyncio.wait({doing})  # at once
            raise


def _retrieve(done: asyncio.Future[T]) -> None:
    if not done.cancelled():
        done.exception()
