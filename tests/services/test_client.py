"""The Python client against a real gRPC server that says what a script says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scripted_router import PROMPT_TOKENS, ScriptedRouter, answer, talking_to
from twostroke import wire
from twostroke.client import Client
from twostroke.errors import BlocksMissing, ContextTooLong, InvalidRequest, NotFound
from twostroke.types import CachePolicy, FinishReason, Message
from twostroke.v1 import common_pb2


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
            keep_for=2.5,
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
    assert wire.seconds(request.keep_for) == 2.5
    assert request.priority == common_pb2.PRIORITY_UNSPECIFIED


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"temperature": 3.0}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"n": 2}, "n"),
        ({"timeout": 0.0}, "timeout"),
        ({"keep_for": 0.0}, "keep_for"),
        ({"keep_for": 5.0, "cache_policy": CachePolicy.BYPASS}, "keep_for"),
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
