"""TCP: pulls blocks from another node's data plane straight into the slots that are to hold them.

The kernel copies from the source's arena into its socket, and from ours into the slot; nothing lies in between. A
block's checksum is verified while the kernel receives the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from twostroke.errors import DeadlineExceeded, Overloaded, TwostrokeError
from twostroke.kv.refs import BlockSlot, Offer
from twostroke.kv.transport import frames
from twostroke.kv.transport.frames import Names
from twostroke.kv.transport.peer import Grant, Pulled, Seal
from twostroke.kv.transport.pull import Connection, Stale, TimeLeft

KIND = "tcp"


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpLimits:
    """Bounds on what one peer may cost."""

    connections: int = 4  # reads that move bytes at once, each in a thread of its own
    waiting: int = 64  # reads that wait for a connection
    connect_seconds: float = 2.0
    block_seconds: float = 5.0  # for a block, or an answer, to come


class TcpTransport:
    """A bounded pool of connections to one data plane. See PeerTransport.

    A connection that fails in any way is closed. One that the source has closed meanwhile is replaced, once for each
    that was kept.
    """

    def __init__(self, offer: Offer, limits: TcpLimits | None = None) -> None:
        self._address = offer.address
        self._limits = limits or TcpLimits()
        self._idle: list[Connection] = []
        self._turns = asyncio.Semaphore(self._limits.connections)
        self._waiting = 0
        self._threads = ThreadPoolExecutor(self._limits.connections, thread_name_prefix="kv-pull")

    async def read(
        self, grant: Grant, blocks: Sequence[BlockSlot], into: Sequence[memoryview], deadline: float | None
    ) -> Pulled:
        """See PeerTransport."""
        whole: list[Seal] = []
        if not blocks:
            return Pulled(())
        try:
            names = Names(grant.lease.incarnation, grant.lease.id, grant.namespace)
            request = frames.request(names, grant.proof, blocks)
            async with self._turn(deadline):
                await self._pull(request, into, whole, TimeLeft.until(deadline, self._limits.block_seconds))
        except TwostrokeError as error:
            return Pulled(tuple(whole), error)
        return Pulled(tuple(whole))

    async def close(self) -> None:
        """See PeerTransport."""
        while self._idle:
            self._idle.pop().close()
        self._threads.shutdown()

    @asynccontextmanager
    async def _turn(self, deadline: float | None) -> AsyncIterator[None]:
        """Hold one of the connections' turns inside the block."""
        if self._waiting >= self._limits.waiting:
            raise Overloaded(f"{self._waiting} reads wait for this peer")
        self._waiting += 1
        try:
            async with asyncio.timeout_at(deadline):
                await self._turns.acquire()
        except TimeoutError as error:
            raise DeadlineExceeded("the request's time is up") from error
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._turns.release()

    async def _pull(self, request: bytes, into: Sequence[memoryview], whole: list[Seal], left: TimeLeft) -> None:
        while self._idle:
            try:
                return await self._on(self._idle.pop(), request, into, whole, left)
            except Stale:
                continue
        return await self._on(await self._connected(left), request, into, whole, left)

    async def _on(
        self, connection: Connection, request: bytes, into: Sequence[memoryview], whole: list[Seal], left: TimeLeft
    ) -> None:
        connection.begin(request)
        try:
            await self._in_thread(connection, partial(connection.pull, into, whole, left))
        finally:
            if connection.in_step:
                self._idle.append(connection)
            else:
                connection.close()

    async def _in_thread(self, connection: Connection, work: Callable[[], None]) -> None:
        """Run work in a thread; if cancelled, break the connection and wait: the memory is not free before."""
        task = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            connection.shut()
            while not task.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({task})
            task.exception()  # of no interest any more
            connection.in_step = False
            raise

    async def _connected(self, left: TimeLeft) -> Connection:
        host, _, port = self._address.decode(errors="replace").rpartition(":")
        try:
            async with asyncio.timeout(min(self._limits.connect_seconds, left.seconds())):
                loop = asyncio.get_running_loop()
                found = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
                family, kind, protocol, _, address = found[0]
                made = socket.socket(family, kind, protocol)
                try:
                    made.setblocking(False)
                    await loop.sock_connect(made, address)
                    return Connection(made)
                except BaseException:
                    made.close()
                    raise
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            raise left.blame(error, f"the peer at {host}:{port} cannot be reached") from error
