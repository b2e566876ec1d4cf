"""The prefill service: assemble, serve, take apart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.prefill.service import PrefillService
from services.prefill.settings import PrefillSettings
from twostroke.cluster import Role
from twostroke.rpc.gate import Gate
from twostroke.rpc.server import Server, serving
from twostroke.telemetry import Telemetry, telemetry
from twostroke.worker.service import WorkerService
from twostroke.worker.worker import Worker, started


@asynccontextmanager
async def assembled(settings: PrefillSettings, spans: Telemetry) -> AsyncIterator[tuple[Server, Worker]]:
    """Serve inside the block; leaving it drains."""
    async with started(settings) as worker:
        gate = Gate(settings.server.max_calls)
        services = (PrefillService(worker, spans), WorkerService(worker, Role.PREFILL, gate))
        async with serving(settings.server, *services, gate=gate) as server:
            yield server, worker


async def run(settings: PrefillSettings) -> None:
    """Serve until told to stop, then drain."""
    with telemetry("prefill", settings.telemetry) as spans:
        async with assembled(settings, spans) as (_, worker):
            await worker.until_told(settings.server)
