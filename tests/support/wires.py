"""A way to a server on which connections break while both ends live on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Wire:
    """Passes bytes on between clients and the server at `target`, host:port, until it is cut."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._ends: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    @classmethod
    @asynccontextmanager
    async def to(cls, target: str) -> AsyncIterator[Wire]:
        """A wire to the server inside the block."""
        wire = cls(target)
        listening = await asyncio.start_server(wire._connected, "127.0.0.1", 0)
        wire.address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        try:
            yield wire
        finally:
            listening.close()
            wire.cut()
            if wire._tasks:
                await asyncio.wait(wire._tasks)

    def cut(self) -> None:
        """Reset all connections. New ones may be made."""
        for end in self._ends:
            end.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        back, forth = await asyncio.open_connection(self._host, self._port)
        ends = {writer, forth}
        self._ends |= ends
        try:
            await asyncio.gather(_passed(reader, forth), _passed(back, writer))
        finally:
            self._ends -= ends
            for end in ends:
                end.transport.abort()


async def _passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
