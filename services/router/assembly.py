"""The router: assemble, serve, take apart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.router.access import access
from services.router.accounting import Ledger
from services.router.advisor import Advisor
from services.router.dispatch import Dispatch
from services.router.fleet import Fleet
from services.router.gateway.app import http_door
from services.router.guard import Guard
from services.router.metrics import Metrics
from services.router.placer import Placer
from services.router.service import RouterService
from services.router.settings import RouterSettings
from services.router.stores import Stores
from twostroke.routing.index import PrefixIndex
from twostroke.rpc.gate import Gate
from twostroke.rpc.server import Server, serving, told_to_stop
from twostroke.telemetry import Telemetry, telemetry

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Doors:
    """Where the router answers, and what is behind."""

    grpc: str
    http: str
    fleet: Fleet
    dispatch: Dispatch


@asynccontextmanager
async def assembled(settings: RouterSettings, spans: Telemetry) -> AsyncIterator[Doors]:
    """Serve inside the block; leaving it drains both doors."""
    told = settings.dispatch
    metrics, index = Metrics(), PrefixIndex(told.index_keys)
    gate = Gate(settings.server.max_calls)  # one bound over both doors
    with Ledger.opened(told.usage_log, metrics) as ledger:
        async with (
            access(settings.api_keys) as known,
            Fleet.running(settings.prefill, settings.decode, told.worker_silence_seconds, index.forget) as fleet,
            Stores.connected(lambda: fleet.kv_format, lambda: fleet.stores) as stores,
        ):
            placer = Placer(fleet, index, told.worker_wait_seconds)
            advisor = Advisor(stores, metrics, told.advice_calls)
            dispatch = Dispatch(fleet, placer, stores, advisor, ledger, metrics, spans)
            service = RouterService(dispatch, fleet, gate, known, told)
            async with (
                serving(settings.server, service, gate=gate, guard=Guard(known), ready=False) as server,
                http_door(settings.gateway, dispatch, gate, known, drain_seconds=settings.server.drain_seconds) as http,
            ):
                announcing = asyncio.create_task(_announce(fleet, server, http), name="readiness")
                try:
                    yield Doors(server.address, http, fleet, dispatch)
                finally:
                    announcing.cancel()
                    await asyncio.wait({announcing})
                    await server.close()  # both doors drain from here on, side by side
            dispatch.close()


async def run(settings: RouterSettings) -> None:
    """Serve until told to stop, then drain."""
    with telemetry("router", settings.telemetry) as spans:
        async with assembled(settings, spans):
            await told_to_stop(settings.server)


async def _announce(fleet: Fleet, server: Server, address: str) -> None:
    """Keep the health service in step with the fleet, and log each change."""
    log.info("listening", extra={"http": address, "grpc": server.address})
    while True:
        reason = fleet.readiness
        await server.set_ready(reason is None)
        if reason is None:
            log.info("ready", extra={"http": address, "grpc": server.address})
        else:
            log.info("not ready", extra={"reason": reason})
        while fleet.readiness == reason:
            await fleet.changed()
