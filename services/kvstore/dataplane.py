"""The data plane: a plain TCP door of the node, through which other hosts' nodes read leased blocks.

Each connection has a thread of its own that blocks in the kernel; there is a bounded number of them, and one more is
told so and closed. Connections are accepted, counted and closed on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from services.kvstore.sending import Sender
from services.kvstore.settings import DataSettings
from twostroke.errors import Unavailable
from twostroke.kv.refs import Offer
from twostroke.kv.transport import tcp
from twostroke.kv.transport.frames import Code, Status

log = logging.getLogger(__name__)

BACKLOG = 128
ACCEPT_PAUSE_SECONDS = 0.1  # when the process has no more descriptors: nothing says when it has again


class DataPlane:
    """Serves on a listening socket until it is closed. Belongs to the event loop.

    Attributes:
        offer: what peers are told.
        refused: how many connections ended with each code.
    """

    def __init__(self, listener: socket.socket, advertise: str, sender: Sender, connections: int) -> None:
        host, port = listener.getsockname()[:2]
        self.offer = Offer(tcp.KIND, (advertise or f"{host}:{port}").encode())
        self.refused: Counter[Code] = Counter()
        self._listener = listener
        self._sender = sender
        self._most = connections
        self._open: dict[asyncio.Future[Code], socket.socket] = {}
        self._threads = ThreadPoolExecutor(connections, thread_name_prefix="kv-send")

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._open)

    async def accept(self) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                log.warning("cannot accept a connection", extra={"error": str(error)})
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            if len(self._open) < self._most:
                task = loop.run_in_executor(self._threads, self._sender.serve, connection)
                self._open[task] = connection
                task.add_done_callback(self._ended)
            else:
                self._turn_away(connection)

    async def close(self) -> None:
        """End every connection, and return when no thread sends any more."""
        self._listener.close()
        for connection in self._open.values():
            with contextlib.suppress(OSError):  # the peer was faster
                connection.shutdown(socket.SHUT_RDWR)
        if self._open:
            await asyncio.wait(self._open)
        self._threads.shutdown()

    def _turn_away(self, connection: socket.socket) -> None:
        self.refused[Code.BUSY] += 1
        with connection, contextlib.suppress(OSError):
            connection.send(Status(Code.BUSY).pack())  # an empty send buffer has room for it

    def _ended(self, task: asyncio.Future[Code]) -> None:
        self._open.pop(task).close()
        error = task.exception()
        if error is None:
            self.refused[task.result()] += 1
            log.info("refused a peer", extra={"code": task.result().name})
        elif not isinstance(error, OSError):  # peers leave, and are slow: that is their business
            log.error("sending failed", exc_info=error)


@asynccontextmanager
async def serving_data(settings: DataSettings, sender: Sender) -> AsyncIterator[DataPlane]:
    """Serve the data plane inside the block. Raises Unavailable, when the address cannot be bound."""
    host, _, port = settings.data_listen.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, int(port)), family=family, backlog=BACKLOG)
    except OSError as error:
        raise Unavailable(f"cannot listen on {settings.data_listen}: {error.strerror}") from error
    listener.setblocking(False)
    plane = DataPlane(listener, settings.data_advertise, sender, settings.data_connections)
    log.info("serving data", extra={"address": plane.offer.address.decode()})
    accepting = asyncio.create_task(plane.accept(), name="data connections")
    try:
        yield plane
    finally:
        accepting.cancel()
        await asyncio.wait({accepting})
        await plane.close()
