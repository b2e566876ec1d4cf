"""When the Python client tries again, when it gives up, and how it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest

from tests.support.scripted_router import ScriptedRouter, Step, answer, delta, started, talking_to
from twostroke.client import Client
from twostroke.errors import DeadlineExceeded, Overloaded, Unavailable, WorkerLost
from twostroke.rpc.server import ServerSettings, serving
from twostroke.types import Delta, Event
from twostroke.v1 import router_pb2


@pytest.mark.parametrize(
    "refusal",
    [
        lambda _: [Overloaded("full", retry_after=0.01)],
        lambda _: [Unavailable("draining", retry_after=0.01)],
        lambda request: [started(request), WorkerLost("gone")],
    ],
)
async def test_what_failed_before_the_first_delta_is_tried_again_unnoticed(refusal: Any) -> None:
    router = ScriptedRouter(refusal, refusal, answer)
    async with talking_to(router) as client:
        events = [event async for event in client.generate("Hi")]
    assert events == answer(router.requests[0])
    assert len(router.requests) == 3
    assert router.requests[0] == router.requests[2]  # the same seed: the answer is the same one


async def test_nothing_is_tried_again_after_the_first_delta() -> None:
    router = ScriptedRouter(lambda request: [started(request), delta("He", 1), WorkerLost("gone")])
    seen: list[Event] = []

    async def gather(client: Client) -> None:
        async for event in client.generate("Hi"):
            seen.append(event)  # noqa: PERF401 - what came before the error counts

    async with talking_to(router) as client:
        with pytest.raises(WorkerLost):
            await gather(client)
    assert [event.text for event in seen if isinstance(event, Delta)] == ["He"]
    assert len(router.requests) == 1


async def test_tries_are_bounded() -> None:
    router = ScriptedRouter(lambda _: [Overloaded("full", retry_after=0.001)])
    async with talking_to(router) as client:
        with pytest.raises(Overloaded):
            await client.complete("Hi")
    assert len(router.requests) == 4


async def test_a_pause_that_would_outlast_the_time_limit_is_not_begun() -> None:
    router = ScriptedRouter(lambda _: [Overloaded("full", retry_after=60.0)])
    async with talking_to(router) as client:
        with pytest.raises(Overloaded) as caught:
            await client.complete("Hi", timeout=30.0)
    assert caught.value.retry_after == 60.0
    assert len(router.requests) == 1


async def test_every_call_has_a_time_limit_and_a_retry_only_what_is_left_of_it() -> None:
    router = ScriptedRouter(lambda _: [Overloaded("full", retry_after=0.3)], answer)
    async with talking_to(router) as client:
        await client.complete("Hi", timeout=7.0)
        await client.models(timeout=5.0)
        await client.status()
    first, second, models, status = router.remaining
    assert 8.0 > first > second + 0.1 > 0  # gRPC rounds time limits up, by a tenth of a second here
    assert 6.0 > models > 0
    assert 11.0 > status > 0


async def test_a_time_limit_that_passes_is_a_typed_error() -> None:
    router = ScriptedRouter(lambda request: [started(request), asyncio.Event()])
    async with talking_to(router) as client:
        with pytest.raises(DeadlineExceeded):
            await client.complete("Hi", timeout=0.2)
        await router.left.wait()


async def test_leaving_the_iterator_cancels_the_call() -> None:
    router = ScriptedRouter(lambda request: [started(request), delta("He", 1), asyncio.Event()])
    async with talking_to(router) as client:
        async with aclosing(client.generate("Hi")) as events:
            async for event in events:
                if isinstance(event, Delta):
                    break
            assert not router.left.is_set()
        await router.left.wait()


async def test_cancelling_the_caller_cancels_the_call() -> None:
    reached = asyncio.Event()

    def script(request: router_pb2.GenerateRequest) -> Iterator[Step]:
        yield started(request)
        reached.set()
        yield asyncio.Event()

    router = ScriptedRouter(script)
    async with talking_to(router) as client:
        asking = asyncio.create_task(client.complete("Hi"))
        await reached.wait()
        asking.cancel()
        await router.left.wait()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_nobody_at_the_address_is_unavailable_and_says_where() -> None:
    async with serving(ServerSettings(), ScriptedRouter(answer)) as server:
        address = server.address
    async with Client(address) as client:
        with pytest.raises(Unavailable, match=address.replace(".", r"\.")):
            await client.complete("Hi", timeout=5.0)
        with pytest.raises(Unavailable):
            await client.status(timeout=5.0)
