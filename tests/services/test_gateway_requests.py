"""Bodies, routes and headers at the HTTP door."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from typing import Any

import aiohttp
import pytest

from services.router.gateway.app import INLINE_BODY_BYTES
from tests.support.script import MODEL, Scripted, said, served

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
JSON = {"Content-Type": "application/json"}


def answers() -> Scripted:
    return Scripted(lambda request: said(request, "x"))


async def post(body: bytes, headers: dict[str, str] | None = None, **settings: float) -> tuple[int, Any]:
    generator = answers()
    async with (
        served(generator, **settings) as url,
        aiohttp.ClientSession(url) as http,
        http.post(CHAT, data=body, headers=JSON if headers is None else headers) as response,
    ):
        told = await response.json()
        assert (response.status == 200) == bool(generator.requests)
        return response.status, told.get("error")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": Infinity}',
        b'{"messages": [{"role": "user", "content": "a"}], "n": 1, "n": 2}',
        b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"seed": ' + b"9" * 5_000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=[
        "empty",
        "cut",
        "list",
        "null",
        "text",
        "nan",
        "inf",
        "twice",
        "surrogate",
        "bytes",
        "digits",
        "deep",
        "deeper",
    ],
)
async def test_a_body_that_is_not_strict_json_is_refused(body: bytes) -> None:
    status, error = await post(body)
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_request")


async def test_a_body_of_another_type_is_refused_with_the_cure() -> None:
    status, error = await post(json.dumps(HELLO).encode(), {"Content-Type": "text/plain"})
    assert status == 415
    assert "application/json" in error["cure"]


async def test_a_body_over_the_limit_is_refused_while_it_is_read() -> None:
    status, error = await post(json.dumps(HELLO).encode().ljust(2_000), http_body_bytes=1_000)
    assert (status, error["code"]) == (413, "too_large")


@pytest.mark.parametrize(("field", "status"), [({}, 200), ({"n": 0}, 400)])
async def test_a_body_too_large_for_the_event_loop_is_read_as_any_other(field: dict[str, int], status: int) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "a" * (2 * INLINE_BODY_BYTES)}]} | field).encode()
    found, error = await post(body)
    assert (found, error and error["param"]) == (status, "n" if field else None)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "GZIP", "gzip, br", "unheard-of"])
@pytest.mark.parametrize("body", [json.dumps(HELLO).encode(), gzip.compress(json.dumps(HELLO).encode())])
async def test_an_encoded_body_is_refused_with_the_cure_and_without_a_word_in_the_log(
    encoding: str, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    status, error = await post(body, JSON | {"Content-Encoding": encoding})
    assert (status, error["code"]) == (415, "unsupported_media_type")
    assert "without Content-Encoding" in error["cure"]
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_a_body_said_to_be_encoded_as_it_is_is_read() -> None:
    assert (await post(json.dumps(HELLO).encode(), JSON | {"Content-Encoding": "identity"}))[0] == 200


async def test_a_body_that_never_arrives_is_given_up() -> None:
    async def stuck() -> Any:
        yield b'{"messages'
        await asyncio.Event().wait()

    async with (
        served(answers(), http_body_seconds=0.05) as url,
        aiohttp.ClientSession(url) as http,
        http.post(CHAT, data=stuck(), headers=JSON) as response,
    ):
        assert response.status == 408


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1//chat/completions", 404),
        ("GET", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/health/live", 405),
    ],
)
async def test_a_wrong_route_or_method_is_an_error_of_the_api(method: str, path: str, status: int) -> None:
    async with (
        served(answers()) as url,
        aiohttp.ClientSession(url) as http,
        http.request(method, path) as response,
    ):
        assert response.status == status
        assert set((await response.json())["error"]) == {"message", "type", "param", "code", "cure"}
        assert ("Allow" in response.headers) == (status == 405)
        assert response.headers["x-request-id"]


@pytest.mark.parametrize("given", ["abc-1", "00f0/x=.:+_", "a" * 96])
async def test_a_usable_request_id_is_kept_and_given_to_the_request(given: str) -> None:
    generator = answers()
    async with (
        served(generator) as url,
        aiohttp.ClientSession(url) as http,
        http.post(CHAT, json=HELLO, headers={"x-request-id": given}) as response,
    ):
        assert response.headers["x-request-id"] == given
        assert (await response.json())["id"] == f"chatcmpl-{given}"
    assert generator.requests[0].context.request_id == given


@pytest.mark.parametrize("given", ["", "a b", "a" * 97, "\xe9", "a\tb"])
async def test_an_unusable_request_id_is_replaced(given: str) -> None:
    generator = answers()
    async with (
        served(generator) as url,
        aiohttp.ClientSession(url) as http,
        http.post(CHAT, json=HELLO, headers={"x-request-id": given}) as response,
    ):
        made = response.headers["x-request-id"]
    assert made != given
    assert generator.requests[0].context.request_id == made


async def test_nothing_looks_ready_before_it_is() -> None:
    generator = Scripted(lambda request: said(request, "x"), models=(), readiness="no prefill worker yet")
    async with served(generator) as url, aiohttp.ClientSession(url) as http:
        async with http.get("/health/live") as live:
            assert live.status == 200
        for method, path in [
            ("GET", "/health"),
            ("GET", "/health/ready"),
            ("GET", "/v1/models"),
            ("GET", "/v1/models/default"),
            ("POST", CHAT),
            ("POST", "/v1/completions"),
        ]:
            async with http.request(method, path, json=HELLO if method == "POST" else None) as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "1"), path
                assert (await response.json())["error"]["message"] == "no prefill worker yet"
        generator.models, generator.readiness = (MODEL,), None
        for path in ("/health", "/health/ready", "/v1/models"):
            async with http.get(path) as response:
                assert response.status == 200


async def test_a_model_is_found_by_its_name_and_by_the_alias() -> None:
    async with served(answers()) as url, aiohttp.ClientSession(url) as http:
        async with http.get("/v1/models") as response:
            (card,) = (await response.json())["data"]
        assert (card["id"], card["object"], card["max_model_len"]) == (MODEL.id, "model", 256)
        assert (card["weight_mode"], card["system_fingerprint"]) == ("f32", "fp-1")
        for name in (MODEL.id, "default"):
            async with http.get(f"/v1/models/{name}") as response:
                assert await response.json() == card
        async with http.get("/v1/models/other") as response:
            assert response.status == 404


async def test_metrics_come_in_the_prometheus_format() -> None:
    async with served(answers()) as url, aiohttp.ClientSession(url) as http, http.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert await response.read() == answers().render_metrics()
