"""Nodes' directories over a real Redis, and the ways to it that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import redis

from services.kvstore.directory.breaker import State
from services.kvstore.directory.directory import Directory
from services.kvstore.directory.names import Names
from services.kvstore.directory.peer import Peer
from services.kvstore.directory.settings import DirectorySettings
from tests.support.redis import RedisServer
from tests.support.stores import KV_FORMAT, WAIT_SECONDS, eventually
from twostroke.kv.keys import KEY_BYTES

FORMAT = KV_FORMAT.digest
NAMES = Names("twostroke", FORMAT)
ROOT = Path(__file__).parents[2]
# Beats every 0.3 s and probes every few milliseconds; limits that a busy machine keeps.
QUICK = DirectorySettings(
    redis_lookup_seconds=0.5, redis_write_seconds=0.5, redis_retry_seconds=0.02, directory_ttl_seconds=0.9
)

NODE = """
import asyncio, sys
from dataclasses import replace
from tests.support.directories import FORMAT, QUICK, eventually, peer, up
from tests.support.stores import key
from services.kvstore.directory.directory import Directory

async def main(url, incarnation, ttl, *names):
    settings = replace(QUICK, redis_url=url, directory_ttl_seconds=float(ttl))
    async with Directory.running(settings, peer(incarnation), FORMAT) as directory:
        directory.add([key(int(name)) for name in names])
        await eventually(lambda: up(directory) and not directory.stats().waiting)
        print("told", flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


def peer(incarnation: str) -> Peer:
    """A node's introduction."""
    offers = (("tcp", "10.0.0.1:7001"), ("grpc", "10.0.0.1:7000"))
    return Peer(incarnation=incarnation, address="10.0.0.1:7000", offers=offers, started=1_700_000_000.0)


@asynccontextmanager
async def node(
    url: str, incarnation: str, *, told: DirectorySettings = QUICK, format_digest: bytes = FORMAT
) -> AsyncIterator[Directory]:
    """A node's directory; Redis may be away."""
    async with Directory.running(replace(told, redis_url=url), peer(incarnation), format_digest) as directory:
        yield directory


@asynccontextmanager
async def process_of(
    url: str, incarnation: str, ttl: float, names: Iterable[int]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A node in a process of its own that has told Redis of these keys."""
    arguments = (url, incarnation, str(ttl), *map(str, names))
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", NODE, *arguments, stdout=PIPE, cwd=ROOT)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(WAIT_SECONDS):
            assert await process.stdout.readline() == b"told\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def up(directory: Directory) -> bool:
    """Whether Redis is reached and knows of this node."""
    return directory.stats().state is State.UP


def down(directory: Directory) -> bool:
    """Whether Redis was given up."""
    return directory.stats().state is State.DOWN


def told(server: RedisServer, incarnation: str, names: Names = NAMES) -> set[bytes]:
    """The keys that Redis has for a node; the marker, which is no key, left out. Nothing where there is no set."""
    members = server.admin.smembers(names.blocks(incarnation))
    return {member for member in members if isinstance(member, bytes) and len(member) == KEY_BYTES}


async def settled(server: RedisServer, directory: Directory, incarnation: str, keys: Iterable[bytes]) -> None:
    """Return when Redis is up, knows exactly these keys of a node, and nothing waits."""
    wanted = set(keys)

    def holds() -> bool:
        with contextlib.suppress(redis.RedisError):
            return up(directory) and not directory.stats().waiting and told(server, incarnation) == wanted
        return False

    await eventually(holds)


class Proxy:
    """A way to Redis on which bytes may be lost or held up."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._flows = asyncio.Event()  # what clients sent on connections made before it was cleared
        self._tasks: set[asyncio.Task[None]] = set()
        self.swallows = False
        self.open = self.most_open = 0
        self.url = ""
        self._flows.set()

    @classmethod
    @asynccontextmanager
    async def to(cls, server: RedisServer) -> AsyncIterator[Proxy]:
        """A proxy to the server inside the block."""
        proxy = cls(server.port)
        listening = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
        proxy.url = f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        try:
            yield proxy
        finally:
            listening.close()
            for task in proxy._tasks:
                task.cancel()
            if proxy._tasks:
                await asyncio.wait(proxy._tasks)

    def hold(self) -> asyncio.Event:
        """Keep what comes on the connections that are open, also when their clients go; set the event to let it go."""
        held, self._flows = self._flows, asyncio.Event()
        self._flows.set()
        held.clear()
        return held

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        flows = self._flows
        back, forth = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            answers = asyncio.create_task(self._answers(back, writer))
            try:
                while data := await reader.read(1 << 16):
                    await flows.wait()
                    if not self.swallows:
                        forth.write(data)
                await forth.drain()
                forth.write_eof()
                await answers
            finally:
                answers.cancel()
                await asyncio.wait({answers})
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self.open -= 1
            self._tasks.discard(task)
            forth.close()
            writer.close()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if not self.swallows:
                    writer.write(data)
        writer.close()
