"""Connections that are lost without a word: a worker behind one is found again by another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.router.fleet import Fleet
from tests.support.cluster import Shape, started, tiny_model
from twostroke.cluster import Role

SILENCE_SECONDS = 1.0
SOON_SECONDS = 20.0  # less than it takes gRPC to give a silent connection up


class Proxy:
    """Passes bytes on, both ways, until its connections are lost: those stay open, and nothing comes any more."""

    def __init__(self, target: str) -> None:
        self.address = ""
        self._target = target.rpartition(":")
        self._passing: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    @classmethod
    @asynccontextmanager
    async def before(cls, target: str) -> AsyncIterator[Proxy]:
        proxy = cls(target)
        server = await asyncio.start_server(proxy._accept, "127.0.0.1")
        proxy.address = "{}:{}".format(*server.sockets[0].getsockname())
        try:
            yield proxy
        finally:
            server.close()
            await proxy.lose()
            for writer in proxy._writers:
                writer.close()

    async def lose(self) -> None:
        """Lose the connections that there are; new ones pass."""
        passing, self._passing = self._passing, set()
        for task in passing:
            task.cancel()
        if passing:
            await asyncio.wait(passing)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target
        there, back = await asyncio.open_connection(host, int(port))
        self._writers += [writer, back]
        for source, sink in ((reader, back), (there, writer)):
            self._passing.add(asyncio.create_task(_pass(source, sink)))


async def _pass(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()


async def test_a_worker_whose_connection_was_lost_without_a_word_joins_again_over_a_new_one(tmp_path: Path) -> None:
    left: list[str] = []
    async with (
        started(Shape(model=tiny_model(tmp_path))) as cluster,
        Proxy.before(cluster.doors.fleet.members[0].address) as proxy,
        Fleet.running([proxy.address], [], SILENCE_SECONDS, left.append) as fleet,
        asyncio.timeout(SOON_SECONDS),
    ):
        for losses in range(3):
            while not fleet.available(Role.PREFILL):
                await fleet.changed()
            await proxy.lose()
            while len(left) == losses:
                await fleet.changed()
        assert set(left) == {proxy.address}
