"""The decode service: assemble, serve, take apart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.decode.admission import Admission
from services.decode.publisher import Publisher
from services.decode.service import DecodeService
from services.decode.settings import DecodeSettings
from twostroke.cluster import Role
from twostroke.rpc.gate import Gate
from twostroke.rpc.server import Server, serving
from twostroke.telemetry import Telemetry, telemetry
from twostroke.worker.service import WorkerService
from twostroke.worker.worker import Worker, started


@asynccontextmanager
async def assembled(settings: DecodeSettings, spans: Telemetry) -> AsyncIterator[tuple[Server, Worker]]:
    """Serve inside the block; leaving it drains."""
    async with started(settings) as worker, Publisher.running(worker, _queue(settings, worker)) as publisher:
        gate = Gate(settings.server.max_calls)
        admission = Admission(worker, publisher, recompute_tokens=settings.recompute_tokens)
        services = (DecodeService(worker, admission, spans), WorkerService(worker, Role.DECODE, gate))
        async with serving(settings.server, *services, gate=gate) as server:
            yield server, worker


def _queue(settings: DecodeSettings, worker: Worker) -> int:
    """Blocks that may wait for the store: pages that answers need, so never more than a quarter of them."""
    return max(1, min(settings.publish_queue, worker.engine.cache.pages // 4))


async def run(settings: DecodeSettings) -> None:
    """Serve until told to stop, then drain."""
    with telemetry("decode", settings.telemetry) as spans:
        async with assembled(settings, spans) as (_, worker):
            await worker.until_told(settings.server)
