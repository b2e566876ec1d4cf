"""What happens around an answer: clients that leave, that do not read, that wait; limits of time; draining."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from services.router.access import Everybody
from services.router.gateway.app import http_door
from services.router.gateway.settings import GatewaySettings
from tests.support.script import Scripted, delta, said, served, started
from twostroke.errors import Unavailable
from twostroke.rpc.gate import Gate

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
STREAMED = HELLO | {"stream": True}
CHAT = "/v1/chat/completions"


def waiting(event: asyncio.Event) -> Any:
    """A script that says one word, then waits."""

    def script(request: Any) -> Any:
        return [started(request), delta("Hel"), event, *said(request, "lo")[1:]]

    return script


async def first_text(response: aiohttp.ClientResponse) -> None:
    """Return once the first content arrived."""
    async for line in response.content:
        if b"Hel" in line:
            return


async def events(response: aiohttp.ClientResponse) -> list[Any]:
    data = [line[6:].strip() async for line in response.content if line.startswith(b"data: ")]
    return [json.loads(each) for each in data if each != b"[DONE]"] + [each for each in data if each == b"[DONE]"]


async def test_a_client_that_leaves_a_stream_ends_the_work() -> None:
    generator = Scripted(waiting(asyncio.Event()))
    async with served(generator) as url, aiohttp.ClientSession(url) as http:
        async with http.post(CHAT, json=STREAMED) as response:
            await first_text(response)
            assert not generator.closed.is_set()
        await generator.closed.wait()


async def test_a_client_that_leaves_before_a_whole_answer_ends_the_work() -> None:
    reached = asyncio.Event()

    def script(request: Any) -> Iterator[Any]:
        yield started(request)
        reached.set()
        yield asyncio.Event()

    generator = Scripted(script)
    async with served(generator) as url, aiohttp.ClientSession(url) as http:
        asking = asyncio.create_task(http.post(CHAT, json=HELLO))
        await reached.wait()
        asking.cancel()
        await generator.closed.wait()


async def test_a_client_that_leaves_ends_the_work_for_all_its_prompts() -> None:
    generator = Scripted(waiting(asyncio.Event()))
    async with served(generator) as url, aiohttp.ClientSession(url) as http:
        async with http.post("/v1/completions", json={"prompt": ["a", "b", "c"], "stream": True}) as response:
            await first_text(response)
        async with asyncio.timeout(10):
            while generator.open:
                await generator.closed.wait()
                generator.closed.clear()
    assert len(generator.requests) == 3


async def test_a_client_that_does_not_read_stops_the_generator_and_is_cut_off_in_the_end() -> None:
    spoken = 0

    def endless(request: Any) -> Iterator[Any]:
        nonlocal spoken
        yield started(request)
        while True:
            spoken += 1
            yield delta("x" * 100_000)

    generator = Scripted(endless)
    async with served(generator, http_stall_seconds=0.3) as url:
        host, port = urlsplit(url).hostname, urlsplit(url).port
        with socket.create_connection((host, port)) as silent:
            silent.setblocking(False)
            body = json.dumps(STREAMED).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            await asyncio.get_running_loop().sock_sendall(silent, head.encode() + b"\r\n\r\n" + body)
            await generator.closed.wait()
    assert spoken < 1_000  # the kernel's buffers hold some megabytes; an endless stream would not have ended at all


async def test_a_silent_stream_sends_comments_until_the_answer_goes_on() -> None:
    more = asyncio.Event()
    async with (
        served(Scripted(waiting(more)), http_heartbeat_seconds=0.01) as url,
        aiohttp.ClientSession(url) as http,
        http.post(CHAT, json=STREAMED) as response,
    ):
        pings = 0
        async for line in response.content:
            pings += line == b": ping\n"
            if pings == 3:
                break
        more.set()
        assert (await events(response))[-1] == b"[DONE]"


async def test_a_stream_is_not_to_be_buffered_on_its_way() -> None:
    async with (
        served(Scripted(lambda request: said(request, "x"))) as url,
        aiohttp.ClientSession(url) as http,
        http.post(CHAT, json=STREAMED) as response,
    ):
        assert response.content_type == "text/event-stream"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert "no-cache" in response.headers["Cache-Control"]


@pytest.mark.parametrize(("header", "most"), [({"x-request-timeout": "2.5"}, 2.5), ({}, 30.0)])
async def test_the_time_limit_goes_with_the_request(header: dict[str, str], most: float) -> None:
    generator = Scripted(lambda request: said(request, "x"))
    async with (
        served(generator, http_request_seconds=30.0) as url,
        aiohttp.ClientSession(url) as http,
        http.post(CHAT, json=HELLO, headers=header) as response,
    ):
        assert response.status == 200
    (seconds,) = generator.seconds
    assert 0 < seconds <= most


@pytest.mark.parametrize("value", ["0", "-1", "3601", "nan", "inf", "soon", ""])
async def test_a_time_limit_out_of_range_is_refused(value: str) -> None:
    async with (
        served(Scripted(lambda request: said(request, "x"))) as url,
        aiohttp.ClientSession(url) as http,
        http.post(CHAT, json=HELLO, headers={"x-request-timeout": value}) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "x-request-timeout"


async def test_a_full_gate_refuses_before_the_body_is_read() -> None:
    more = asyncio.Event()
    async with (
        served(Scripted(waiting(more)), Gate(1)) as url,
        aiohttp.ClientSession(url) as http,
        http.post(CHAT, json=STREAMED) as response,
    ):
        await first_text(response)
        async with http.post(CHAT, json=HELLO) as refused:
            assert refused.status == 429
            assert refused.headers["Retry-After"] == "1"
        more.set()
        assert (await events(response))[-1] == b"[DONE]"


async def test_draining_finishes_open_streams_and_refuses_new_requests() -> None:
    more, gate = asyncio.Event(), Gate(8)
    async with (
        served(Scripted(waiting(more)), gate) as url,
        aiohttp.ClientSession(url) as http,
        http.post(CHAT, json=STREAMED) as response,
    ):
        await first_text(response)
        gate.close()
        async with http.post(CHAT, json=HELLO) as refused:
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        async with http.get("/health/ready") as ready:
            assert ready.status == 503
        async with http.get("/health/live") as live:
            assert live.status == 200
        more.set()
        assert (await events(response))[-1] == b"[DONE]"


async def test_a_stream_that_outlasts_the_drain_ends_with_an_error_event() -> None:
    gate = Gate(8)
    generator = Scripted(waiting(asyncio.Event()))
    async with (
        served(generator, gate) as url,
        aiohttp.ClientSession(url) as http,
        http.post(CHAT, json=STREAMED) as response,
    ):
        await first_text(response)
        gate.expel()
        last = (await events(response))[-1]
    assert last["error"]["code"] == "unavailable"
    assert generator.closed.is_set()


async def test_the_port_is_free_again_and_a_taken_one_is_a_typed_error() -> None:
    async with served(Scripted(lambda request: said(request))) as url:
        taken = GatewaySettings(http_listen=url.removeprefix("http://"))
        with pytest.raises(Unavailable, match="cannot listen"):
            async with http_door(taken, Scripted(lambda _: []), Gate(1), Everybody(), drain_seconds=0):
                pass
    async with http_door(taken, Scripted(lambda _: []), Gate(1), Everybody(), drain_seconds=0) as address:
        assert address == taken.http_listen
