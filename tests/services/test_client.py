"""The Python client against a real gRPC server that says what a script says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from twostroke import wire
from twostroke.client import Client
from twostroke.errors import (
    BlocksMissing,
    ContextTooLong,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
    WorkerLost,
)
from twostroke.rpc.server import ServerSettings, serving
from twostroke.types import ChoiceFinished, Delta, Event, FinishReason, Message, Started, Token, Usage
from twostroke.v1 import common_pb2, router_pb2, router_pb2_grpc, worker_pb2

Step = Event | Exception | asyncio.Event
PROMPT_TOKENS = 3


class ScriptedRouter(router_pb2_grpc.RouterServiceServicer):
    """Plays one script a try; the last one again and again."""

    full_name = "twostroke.v1.RouterService"

    def __init__(self, *scripts: Callable[[router_pb2.GenerateRequest], Iterable[Step]]) -> None:
        self.scripts = scripts
        self.requests: list[router_pb2.GenerateRequest] = []
        self.remaining: list[float] = []
        self.left = asyncio.Event()

    def register(self, server: Any) -> None:
        router_pb2_grpc.add_RouterServiceServicer_to_server(self, server)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[router_pb2.GenerateResponse]:
        script = self.scripts[min(len(self.requests), len(self.scripts) - 1)]
        self.requests.append(request)
        self.remaining.append(context.time_remaining())
        try:
            for step in script(request):
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield wire.event_pb(step, output=request.output)
        finally:
            self.left.set()

    async def ListModels(self, request: Any, context: Any) -> router_pb2.ListModelsResponse:
        self.remaining.append(context.time_remaining())
        return router_pb2.ListModelsResponse(models=[worker_pb2.ModelInfo(id="tiny", context_tokens=256)])

    async def GetStatus(self, request: Any, context: Any) -> router_pb2.GetStatusResponse:
        self.remaining.append(context.time_remaining())
        return router_pb2.GetStatusResponse(reason="no decode worker", open_requests=2)


def started(request: router_pb2.GenerateRequest) -> Started:
    return Started(
        request_id=request.request_id,
        model="tiny",
        seed=request.sampling.seed,
        prompt_tokens=PROMPT_TOKENS,
        fingerprint="fp",
    )


def delta(text: str, *ids: int) -> Delta:
    return Delta(choice=0, sequence=1, text=text, tokens=tuple(Token(each) for each in ids), total_tokens=len(ids))


def answer(request: router_pb2.GenerateRequest) -> list[Step]:
    usage = Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=3)
    return [started(request), delta("He", 1, 2), delta("y", 3), ChoiceFinished(0, FinishReason.LENGTH), usage]


@asynccontextmanager
async def talking_to(router: ScriptedRouter) -> AsyncIterator[Client]:
    async with (
        serving(ServerSettings(drain_seconds=1.0), router) as server,
        Client(server.address) as client,
    ):
        yield client


async def test_events_arrive_as_the_router_said_them() -> None:
    router = ScriptedRouter(answer)
    async with talking_to(router) as client:
        events = [event async for event in client.generate("Hi", seed=5)]
    assert events == answer(router.requests[0])


async def test_a_completion_gathers_the_whole_choice() -> None:
    async with talking_to(ScriptedRouter(answer)) as client:
        told = await client.complete("Hi", seed=5)
    assert (told.text, told.finish_reason, told.seed) == ("Hey", FinishReason.LENGTH, 5)
    assert [token.id for token in told.tokens] == [1, 2, 3]
    assert (told.usage.prompt_tokens, told.usage.completion_tokens) == (PROMPT_TOKENS, 3)


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [("Hi", "text"), ([1, 2], "token_ids"), ((1,), "token_ids"), ([Message(role="user", content="Hi")], "messages")],
)
async def test_a_prompt_is_text_token_ids_or_a_conversation(prompt: Any, kind: str) -> None:
    router = ScriptedRouter(answer)
    async with talking_to(router) as client:
        await client.complete(prompt)
    assert router.requests[0].WhichOneof("prompt") == kind


async def test_every_parameter_reaches_the_router() -> None:
    router = ScriptedRouter(answer)
    async with talking_to(router) as client:
        await client.complete(
            "Hi",
            max_tokens=9,
            min_tokens=2,
            temperature=0.5,
            top_k=40,
            top_p=0.9,
            logit_bias={7: -1.0},
            seed=2**64 - 1,
            logprobs=2,
            stop="END",
            stop_token_ids=[8],
            ignore_eos=True,
            model="tiny",
            cache_salt="salt",
            session="s",
            request_id="mine",
        )
    (request,) = router.requests
    sampling, stops = request.sampling, request.stops
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.logprobs) == (0.5, 40, 0.9, 2)
    assert (sampling.seed, dict(sampling.logit_bias)) == (2**64 - 1, {7: -1.0})
    assert (stops.max_tokens, stops.min_tokens, list(stops.stop_token_ids), stops.ignore_eos) == (9, 2, [8], True)
    assert list(request.stop_strings) == ["END"]
    assert (request.model, request.cache_salt, request.session, request.request_id) == ("tiny", "salt", "s", "mine")
    assert request.priority == common_pb2.PRIORITY_STANDARD


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"temperature": 3.0}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"n": 2}, "n"),
        ({"timeout": 0.0}, "timeout"),
        ({"prompt": [-5]}, None),
        ({"prompt": [2**40]}, None),
        ({"stop_token_ids": [-1]}, None),
    ],
)
async def test_what_is_wrong_on_sight_is_refused_without_a_call(arguments: dict[str, Any], field: str | None) -> None:
    router = ScriptedRouter(answer)
    async with talking_to(router) as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.complete(**{"prompt": "Hi"} | arguments)
    assert caught.value.field == field
    assert not router.requests


@pytest.mark.parametrize(
    "error",
    [
        ContextTooLong("too long", field="prompt"),
        NotFound("no model is called x", field="model"),
        BlocksMissing("lost twice"),
        InvalidRequest("top_k", field="top_k"),
    ],
)
async def test_an_error_arrives_as_the_class_it_left_as_and_is_not_retried(error: Any) -> None:
    router = ScriptedRouter(lambda _: [error])
    async with talking_to(router) as client:
        with pytest.raises(type(error)) as caught:
            await client.complete("Hi")
    assert (caught.value.message, caught.value.field) == (error.message, error.field)
    assert len(router.requests) == 1


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
    router = ScriptedRouter(lambda _: [Overloaded("full", retry_after=0.05)], answer)
    async with talking_to(router) as client:
        await client.complete("Hi", timeout=7.0)
        await client.models(timeout=5.0)
        await client.status()
    first, second, models, status = router.remaining
    assert 8.0 > first > second > 0  # gRPC rounds up a little
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


async def test_models_and_status_are_plain_values() -> None:
    async with talking_to(ScriptedRouter(answer)) as client:
        (model,) = await client.models()
        status = await client.status()
    assert (model.id, model.context_tokens) == ("tiny", 256)
    assert (status.ready, status.reason, status.open_requests) == (False, "no decode worker", 2)


async def test_a_client_is_used_inside_its_block_only() -> None:
    client = Client("127.0.0.1:1")
    with pytest.raises(RuntimeError, match="async with"):
        await client.complete("Hi")
