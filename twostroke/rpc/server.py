"""One server for every service: gate, health, reflection, signals, drain."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from twostroke.errors import Unavailable
from twostroke.rpc.channel import SERVER_OPTIONS
from twostroke.rpc.gate import Gate
from twostroke.rpc.interceptor import Border
from twostroke.settings import InvalidSetting, setting

if TYPE_CHECKING:
    from twostroke.rpc.faultboard import FaultBoard

log = logging.getLogger(__name__)
grpc_log = logging.getLogger("grpc._cython.cygrpc")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What an operator may tell any gRPC server of the house."""

    listen: str = setting("127.0.0.1:0", help="host:port of the gRPC server; port 0 picks a free one")
    max_calls: int = setting(1_024, help="calls that may be open at once")
    drain_seconds: float = setting(30.0, help="how long open calls may go on after SIGTERM")
    fault_points: bool = setting(
        False, help="let FaultService strike on purpose, to test a cluster; never in production"
    )
    stop_with_stdin: bool = setting(False, help="drain also when standard input closes (set by the launcher)")

    def __post_init__(self) -> None:
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65_535:
            raise InvalidSetting("listen", self.listen, "must be host:port")
        if self.max_calls < 1:
            raise InvalidSetting("max_calls", self.max_calls, "must be at least 1")
        if self.drain_seconds < 0:
            raise InvalidSetting("drain_seconds", self.drain_seconds, "must not be negative")


class _TooLate(logging.Filter):
    """Drops what gRPC logs, with a traceback, of an answer that met the end of its call: a deadline is no defect.

    It does so itself where it has noticed the end before; a batch that could not even be started is a defect.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return type(error).__name__ != "ExecuteBatchError" or not str(error).startswith('Failed "execute_batch"')


_TOO_LATE = _TooLate()


class Service(Protocol):
    """A servicer that knows its name and how to join a server."""

    full_name: str

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer to the server."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that listens."""

    address: str
    gate: Gate
    health: health.aio.HealthServicer
    names: tuple[str, ...]  # of the services, beside the empty one that means all

    async def set_ready(self, ready: bool) -> None:
        """Tell balancers whether to choose us."""
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self.names):
            await self.health.set(name, status)

    async def close(self) -> None:
        """Turn readiness off for good and take no new calls; open ones go on."""
        await self.health.enter_graceful_shutdown()
        self.gate.close()


@asynccontextmanager
async def serving(
    settings: ServerSettings,
    *services: Service,
    gate: Gate | None = None,
    guard: grpc.aio.ServerInterceptor | None = None,
    board: FaultBoard | None = None,
    ready: bool = True,
) -> AsyncIterator[Server]:
    """Serve inside the block. Leaving it drains: open calls may finish for `drain_seconds`, then get Unavailable.

    Args:
        settings: address and limits.
        services: what to serve, beside health and reflection.
        gate: closes when the drain begins; a service that wants to know passes the one it holds.
        guard: sees every call before anything else does, those of health and reflection too.
        board: of a service with operations to strike at, where fault points are on.
        ready: what health says at first.

    Raises: Unavailable, when the address cannot be bound.
    """
    gate = gate or Gate(settings.max_calls)
    interceptors: list[grpc.aio.ServerInterceptor] = [Border(gate)]
    if settings.fault_points:
        from twostroke.rpc.faultboard import FaultBoard
        from twostroke.rpc.faults import FaultPoints, FaultService

        board = board or FaultBoard()
        services = (*services, FaultService(board, [service.full_name for service in services]))
        interceptors.insert(0, FaultPoints(board))
        log.warning("fault points are on: calls can be struck on purpose")
    if guard is not None:
        interceptors.insert(0, guard)
    grpc_log.addFilter(_TOO_LATE)  # once, however often it is said
    server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    for service in services:
        service.register(server)
    names = [service.full_name for service in services]
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    host = settings.listen.rpartition(":")[0]
    try:
        port = server.add_insecure_port(settings.listen)
    except RuntimeError as error:
        raise Unavailable(f"cannot listen on {settings.listen}: the port is in use or not ours") from error
    await server.start()
    running = Server(f"{host}:{port}", gate, healthy, tuple(names))
    await running.set_ready(ready)
    log.info("serving", extra={"address": running.address, "services": names})
    try:
        yield running
    finally:
        await _drain(server, running, settings.drain_seconds)


async def _drain(server: grpc.aio.Server, running: Server, seconds: float) -> None:
    await running.close()
    if not await running.gate.drained(seconds):
        log.warning("ending calls that outlasted the drain", extra={"open": running.gate.open_calls})
        running.gate.expel()
        await running.gate.drained(2.0)
    await server.stop(grace=0.5)


async def told_to_stop(settings: ServerSettings) -> None:
    """Return at SIGTERM or SIGINT, or when standard input closes, where that is asked for.

    A second signal while draining ends the process at once.
    """
    loop = asyncio.get_running_loop()
    told = asyncio.Event()

    def on_signal(number: int) -> None:
        if told.is_set():
            os._exit(128 + number)
        told.set()

    def on_stdin() -> None:
        if not os.read(sys.stdin.fileno(), 4_096):
            loop.remove_reader(sys.stdin.fileno())
            told.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    if settings.stop_with_stdin:
        loop.add_reader(sys.stdin.fileno(), on_stdin)
    await told.wait()
    log.info("draining")
