"""A router whose workers are still to come, seen from its HTTP door."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import aiohttp

from services.decode.assembly import assembled as decode_service
from services.decode.settings import DecodeSettings
from services.kvstore.assembly import assembled as kvstore_service
from services.kvstore.settings import KvStoreSettings, StoreSettings
from services.prefill.assembly import assembled as prefill_service
from services.prefill.settings import PrefillSettings
from services.router.assembly import Doors
from services.router.assembly import assembled as router_service
from services.router.gateway.settings import GatewaySettings
from services.router.settings import RouterSettings
from tests.support.cluster import SERVER, tiny_model
from twostroke.telemetry import Telemetry

ASK = ("POST", "/v1/completions", {"prompt": "Hi", "max_tokens": 2})
READY, MODELS = ("GET", "/health/ready", None), ("GET", "/v1/models", None)


def unused() -> str:
    """An address that nobody listens at yet."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


async def answers(doors: Doors, *calls: tuple[str, str, Any]) -> list[tuple[int, str | None]]:
    """Status and Retry-After of each call."""
    found = []
    async with aiohttp.ClientSession(f"http://{doors.http}") as http:
        for method, path, body in calls:
            async with http.request(method, path, json=body) as response:
                found.append((response.status, response.headers.get("Retry-After")))
    return found


async def until(doors: Doors, reason: str | None) -> None:
    async with asyncio.timeout(30):
        while doors.fleet.readiness != reason:
            await doors.fleet.changed()


async def test_nothing_looks_ready_until_both_kinds_of_worker_are_warm(tmp_path) -> None:
    spans, prefill, decode = Telemetry(None), unused(), unused()
    async with AsyncExitStack() as stack:
        store = KvStoreSettings(server=SERVER, store=StoreSettings(arena_bytes=16 << 20))
        kvstore, _ = await stack.enter_async_context(kvstore_service(store))
        router = RouterSettings(
            prefill=(prefill,),
            decode=(decode,),
            server=SERVER,
            gateway=GatewaySettings(http_listen="127.0.0.1:0"),
        )
        doors = await stack.enter_async_context(router_service(router, spans))
        assert await answers(doors, ("GET", "/health/live", None)) == [(200, None)]
        assert await answers(doors, READY, MODELS, ASK) == [(503, "1")] * 3

        worker: dict[str, Any] = {
            "model": tiny_model(tmp_path / "model"),
            "kvstore": kvstore.address,
            "kv_bytes": "16MiB",
            "weights_cache": "off",
        }
        first = PrefillSettings(server=replace(SERVER, listen=prefill), **worker)
        await stack.enter_async_context(prefill_service(first, spans))
        await until(doors, "no decode worker is available")
        assert await answers(doors, READY, MODELS, ASK) == [(503, "1")] * 3

        second = DecodeSettings(server=replace(SERVER, listen=decode), **worker)
        await stack.enter_async_context(decode_service(second, spans))
        await until(doors, None)
        assert await answers(doors, READY, MODELS, ASK) == [(200, None)] * 3
