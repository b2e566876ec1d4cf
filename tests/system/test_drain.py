"""A service that is told to stop lets open streams finish, within its limit, and says clearly when it does not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from services.router.assembly import assembled as router_service
from services.router.gateway.settings import GatewaySettings
from services.router.settings import RouterSettings
from tests.support.cluster import Shape, started, tiny_model
from twostroke.cli.probe import health
from twostroke.client import Client
from twostroke.errors import Unavailable
from twostroke.rpc.server import ServerSettings
from twostroke.telemetry import Telemetry
from twostroke.types import Delta


def second_router(cluster, server: ServerSettings):
    """A router of its own over the same workers, so that the cluster outlives it."""
    members = cluster.doors.fleet.members
    settings = RouterSettings(
        prefill=tuple(each.address for each in members if each.role.value == "prefill"),
        decode=tuple(each.address for each in members if each.role.value == "decode"),
        server=server,
        gateway=GatewaySettings(http_listen="127.0.0.1:0"),
    )
    return router_service(settings, Telemetry(None))


async def health_of(address: str) -> str:
    try:
        return await health(address, 5.0)
    except Unavailable as error:
        return error.message.rpartition(" ")[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


async def test_a_draining_router_finishes_its_streams_and_takes_no_more(model: Path) -> None:
    async with started(Shape(model=model)) as cluster:
        leaving = second_router(cluster, ServerSettings(drain_seconds=60.0))
        doors = await leaving.__aenter__()
        while doors.fleet.readiness is not None:
            await doors.fleet.changed()
        async with Client(doors.grpc) as client:
            events = client.generate("hello", max_tokens=2_000, ignore_eos=True, temperature=0.0)
            assert await anext(events)
            closing = asyncio.create_task(leaving.__aexit__(None, None, None))
            while await health_of(doors.grpc) == "SERVING":
                await asyncio.sleep(0)
            assert await health_of(doors.grpc) == "NOT_SERVING"  # balancers turn away while streams go on
            assert not closing.done()
            told = [event async for event in events]
            assert sum(len(each.tokens) for each in told if isinstance(each, Delta)) == 2_000
            await closing
            with pytest.raises(Unavailable):
                await client.complete("hello", max_tokens=1, timeout=1)
        await cluster.settled()


async def test_a_stream_that_outlasts_the_drain_ends_with_a_clear_error(model: Path) -> None:
    async with started(Shape(model=model)) as cluster:
        leaving = second_router(cluster, ServerSettings(drain_seconds=0.1))
        doors = await leaving.__aenter__()
        while doors.fleet.readiness is not None:
            await doors.fleet.changed()
        body = {"prompt": "hello", "max_tokens": 4_000, "stream": True, "ignore_eos": True}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"http://{doors.http}/v1/completions", json=body) as response,
        ):
            await response.content.readline()
            closing = asyncio.create_task(leaving.__aexit__(None, None, None))
            rest = await response.content.read()
            assert b'"error"' in rest
            assert b"stopped before the answer was complete" in rest
            assert b"[DONE]" not in rest
            await closing
        await cluster.settled()
