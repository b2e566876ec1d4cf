"""A way from one node to Redis on which a command can be held, and everything be swallowed or refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

LARGEST = 1 << 16


class Relay:
    """Listens for one node. `url` is its way to Redis."""

    def __init__(self, port: int) -> None:
        self.url = ""
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._word: bytes | None = None  # of the command that is held
        self._struck = asyncio.Event()
        self._flows = asyncio.Event()
        self._flows.set()
        self._swallows = self._refuses = False

    @classmethod
    @asynccontextmanager
    async def to(cls, port: int) -> AsyncIterator[Relay]:
        """Relay to the Redis at a port of this machine inside the block."""
        relay = cls(port)
        listening = await asyncio.start_server(relay._serve, "127.0.0.1", 0)
        relay.url = f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        try:
            yield relay
        finally:
            listening.close()
            await relay._break_all()

    def aim(self, word: bytes) -> None:
        """Hold the next command with this word in it, and whatever comes then on all connections."""
        self._struck.clear()
        self._word = word

    async def struck(self, seconds: float) -> None:
        """Return when the command is held. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            await self._struck.wait()

    def swallow(self) -> None:
        """Let nothing through in either direction, and say nothing about it."""
        self._swallows = True
        self.release()

    async def refuse(self) -> None:
        """End every connection, and each new one."""
        self._refuses = True
        self.release()
        await self._break_all()

    def release(self) -> None:
        """Let go of what is held, and aim at nothing."""
        self._word = None
        self._flows.set()

    async def heal(self) -> None:
        """Be a plain way again. What was swallowed is gone: so are the connections that it was on."""
        if self._swallows:
            await self._break_all()
        self._swallows = self._refuses = False
        self.release()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if not self._refuses:
                await self._carry(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection("127.0.0.1", self._port)
        answers = asyncio.create_task(self._answers(back, writer))
        try:
            while data := await reader.read(LARGEST):
                if self._word is not None and self._word in data:
                    self._word = None
                    self._flows.clear()
                    self._struck.set()
                await self._flows.wait()
                if not self._swallows:
                    forth.write(data)
        finally:
            answers.cancel()
            await asyncio.wait({answers})
            forth.close()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(LARGEST):
                if not self._swallows:
                    writer.write(data)
        writer.close()

    async def _break_all(self) -> None:
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
