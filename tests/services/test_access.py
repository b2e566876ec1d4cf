"""Who is let in: with a file of keys, nothing but liveness, readiness and gRPC health answers without one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import grpc
import openai
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.router.access import Everybody, access
from services.router.assembly import Doors, assembled
from services.router.gateway.app import Door
from services.router.gateway.settings import GatewaySettings
from services.router.settings import RouterSettings
from tests.support.apikeys import bearer, tenant, write_keys
from tests.support.script import Scripted, hello, served
from twostroke.client import Client
from twostroke.errors import InvalidRequest, PermissionDenied, Unauthenticated
from twostroke.rpc.channel import connect
from twostroke.rpc.gate import Gate
from twostroke.rpc.server import ServerSettings
from twostroke.telemetry import Telemetry
from twostroke.types import Priority

NOWHERE = "127.0.0.1:1"
PUBLIC_PATHS = {"/health", "/health/live", "/health/ready"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
HELLO = [{"role": "user", "content": "Hello"}]


@asynccontextmanager
async def router(keys: Path) -> AsyncIterator[Doors]:
    """A whole router, without workers: who may ask is decided before what can be answered."""
    settings = RouterSettings(
        prefill=(NOWHERE,),
        decode=(NOWHERE,),
        api_keys=keys,
        gateway=GatewaySettings(http_listen="127.0.0.1:0"),
        server=ServerSettings(drain_seconds=1.0),
    )
    async with assembled(settings, Telemetry(None)) as doors:
        yield doors


def routes() -> set[str]:
    """Every path in the route table of the HTTP door."""
    app = Door(GatewaySettings(), Scripted(hello), Gate(1), Everybody()).application()
    return {resource.canonical.replace("{model}", "default") for resource in app.router.resources()}


def spellings(path: str) -> set[str]:
    """Ways in which a path might slip past a guard that looks at its letters."""
    return {
        *(path, path + "/", "/" + path, path.replace("/", "//"), path.upper()),
        *("/." + path, "/health/live/.." + path, "/health/live/%2e%2e" + path, path + "?/health/live"),
        *(path + "#/health/live", path + "%00", path + ";/health/live", "http://health" + path),
    }


async def status(address: str, method: str, target: str, *headers: str) -> int:
    """The status of a request whose target is sent as it is written here."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = [f"{method} {target} HTTP/1.1", "Host: x", "Connection: close", *headers, "", ""]
    writer.write("\r\n".join(lines).encode())
    line = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return int(line.split()[1])


async def test_every_route_of_the_http_door_needs_a_key_but_the_public_ones(tmp_path: Path) -> None:
    write_keys(tmp_path / "keys.toml", tenant("a"))
    paths = routes()
    assert paths > PUBLIC_PATHS | {"/metrics", "/v1/chat/completions", "/v1/models/default"}
    targets = {spelling for path in {*paths, "/", "/v1", "/nothing", "*"} for spelling in spellings(path)}
    answered = set()
    async with router(tmp_path / "keys.toml") as doors:
        for method, target in itertools.product(METHODS, sorted(targets)):
            found = await status(doors.http, method, target)
            if found not in (400, 401):  # 400: not HTTP, for the parser
                answered.add((method, target, found))
        for target in paths:
            upgrade = await status(doors.http, "GET", target, "Upgrade: websocket", "Connection: upgrade")
            assert upgrade == 401 or target in PUBLIC_PATHS
    assert answered == {
        (method, target, 200 if path == "/health/live" else 503)
        for path in PUBLIC_PATHS
        for method in ("GET", "HEAD")
        for target in (path, path + "?/health/live", path + "#/health/live", "http://health" + path)
    }


async def test_a_refusal_at_the_http_door_has_the_shape_of_the_api(tmp_path: Path) -> None:
    (key,) = write_keys(tmp_path / "keys.toml", tenant("a"))
    async with router(tmp_path / "keys.toml") as doors, aiohttp.ClientSession(f"http://{doors.http}") as http:
        for headers in ({}, bearer("ts-wrong"), bearer(key[:-1]), {"authorization": key}, {"x-api-key": key}):
            async with http.get("/v1/models", headers=headers) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert response.headers["x-should-retry"] == "false"
                assert response.headers["x-request-id"]
                error = (await response.json())["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
            assert key not in str(error)
        for path in ("/v1/models", "/metrics", "/nothing"):
            async with http.get(path, headers=bearer(key)) as response:
                assert response.status == {"/v1/models": 503, "/metrics": 200, "/nothing": 404}[path]


async def services_of(address: str, key: str) -> list[str]:
    """What the server says it serves."""
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    async with connect(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        async for answer in stub.ServerReflectionInfo(iter([ask]), metadata=tuple(bearer(key).items())):
            return [each.name for each in answer.list_services_response.service]
    raise AssertionError("no answer")


async def code(channel: grpc.aio.Channel, method: str, *metadata: tuple[str, str]) -> grpc.StatusCode:
    """How a call ends that sends one empty message.

    In one batch with its end: a refusal that came while a message is still being written would read as INTERNAL.
    """
    call = channel.unary_stream(method)(b"", metadata=metadata, timeout=10)
    with suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    return await call.code()


async def test_every_method_of_the_grpc_door_needs_a_key_but_those_of_health(tmp_path: Path) -> None:
    (key,) = write_keys(tmp_path / "keys.toml", tenant("a"))
    pool = descriptor_pool.Default()
    async with router(tmp_path / "keys.toml") as doors:
        names = await services_of(doors.grpc, key)
        assert {"twostroke.v1.RouterService", "grpc.health.v1.Health"} < set(names)
        methods = {f"/{name}/{method.name}" for name in names for method in pool.FindServiceByName(name).methods}
        methods -= {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}
        unknown = {"/twostroke.v1.RouterService/Nothing", "/grpc.health.v1.Health/Nothing", "/a.B/C", "/", "/a"}
        unknown |= {"/twostroke.v1.routerservice/Generate", "//grpc.health.v1.Health/Check"}
        async with connect(doors.grpc) as channel:
            good = tuple(bearer(key).items())
            for method in methods | unknown:
                for wrong in ((), (("authorization", "Bearer ts-wrong"),), (("x-api-key", key),), good * 2):
                    assert await code(channel, method, *wrong) is grpc.StatusCode.UNAUTHENTICATED, (method, wrong)
            for method in unknown:
                assert await code(channel, method, *good) is grpc.StatusCode.UNIMPLEMENTED
            health = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status
            async for said in health.Watch(health_pb2.HealthCheckRequest()):
                assert said.status
                break


async def test_the_client_presents_its_key_with_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = write_keys(tmp_path / "keys.toml", tenant("a"), tenant("b"))
    async with router(tmp_path / "keys.toml") as doors:
        async with Client(doors.grpc, api_key=keys[0]) as client:
            assert await client.models() == ()
            assert not (await client.status()).ready
        monkeypatch.setenv("TWOSTROKE_API_KEY", keys[1])
        async with Client(doors.grpc) as client:
            assert await client.models() == ()
        async with Client(doors.grpc, api_key="ts-wrong") as client:
            for call in (client.models, client.status, lambda: client.complete("x")):
                with pytest.raises(Unauthenticated) as caught:
                    await call()
                assert "ts-wrong" not in caught.value.message
    with pytest.raises(InvalidRequest):
        Client(doors.grpc, api_key="not a key")


async def test_a_class_over_the_entitlement_is_refused_by_name_at_both_doors(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    key, low = write_keys(path, tenant("a"), tenant("b", highest=Priority.BATCH))
    async with router(path) as doors, Client(doors.grpc, api_key=key) as client:
        with pytest.raises(PermissionDenied) as denied:
            await client.complete("x", priority=Priority.INTERACTIVE)
        assert denied.value.field == "priority"
    generator = Scripted(hello)
    async with access(path) as known, served(generator, access=known) as url:
        for each, told, expected in (
            (key, {}, Priority.STANDARD),
            (key, {"priority": "batch"}, Priority.BATCH),
            (low, {}, Priority.BATCH),
            (low, {"service_tier": "auto"}, Priority.BATCH),
        ):
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=each, max_retries=0) as sdk:
                await sdk.chat.completions.create(model="default", messages=HELLO, extra_body=told)
            assert generator.requests.pop().context.priority is expected
        for each, asked in ((key, "interactive"), (low, "standard")):
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=each, max_retries=0) as sdk:
                with pytest.raises(openai.PermissionDeniedError) as refused:
                    await sdk.chat.completions.create(model="default", messages=HELLO, extra_body={"priority": asked})
            assert (refused.value.param, refused.value.code) == ("priority", "permission_denied")
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk:
            with pytest.raises(openai.AuthenticationError):
                await sdk.chat.completions.create(model="default", messages=HELLO)
    assert not generator.requests


async def test_a_caller_cannot_say_whose_it_is(tmp_path: Path) -> None:
    (key,) = write_keys(tmp_path / "keys.toml", tenant("a", "shared"))
    generator = Scripted(hello)
    async with (
        access(tmp_path / "keys.toml") as known,
        served(generator, access=known) as url,
        aiohttp.ClientSession(url, headers=bearer(key)) as http,
    ):
        for name in ("tenant", "namespace", "context"):
            async with http.post("/v1/chat/completions", json={"messages": HELLO, name: "b"}) as response:
                assert response.status == 400
                assert (await response.json())["error"]["param"] == name
        headers = {"x-tenant": "b", "tenant": "b", "openai-organization": "b", "openai-project": "b"}
        body = {"messages": HELLO, "user": "b", "metadata": {"tenant": "b"}, "cache_salt": "b"}
        async with http.post("/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200
    (request,) = generator.requests
    assert (request.context.tenant, request.context.namespace, request.context.salt) == ("a", "shared", "b")
