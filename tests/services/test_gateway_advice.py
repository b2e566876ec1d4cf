"""Advice about stored prompts at the HTTP door: what it takes, what it refuses, what it says."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from tests.support.script import MODEL, Scripted, hello, served
from twostroke.rpc.gate import Gate
from twostroke.types import Message

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
KEEP, RELEASE, PREFETCH = "/v1/cache/keep", "/v1/cache/release", "/v1/cache/prefetch"


async def post(generator: Scripted, path: str, body: dict[str, Any], gate: Gate | None = None) -> tuple[int, Any]:
    async with (
        served(generator, gate) as url,
        aiohttp.ClientSession(url) as http,
        http.post(path, json=body, headers={"x-request-timeout": "7"}) as response,
    ):
        return response.status, await response.json()


async def test_a_prompt_is_named_as_it_is_asked() -> None:
    generator = Scripted(hello)
    told = {"cache_salt": "s", "model": "tiny", "continue_final_message": True, "fold_system": True}
    status, answer = await post(generator, KEEP, {"messages": HELLO, "keep_for": 3600, **told})
    numbers = {"prompt_tokens": 1, "prompt_blocks": 1, "blocks": 1, "keep_for": 60.0}
    assert (status, answer) == (200, {"object": "cache.keep", "model": MODEL.id, **numbers})
    (request,) = generator.requests
    assert request.prompt == (Message(role="user", content="Hello"),)
    assert (request.context.salt, request.model, request.keep_for) == ("s", "tiny", 3600.0)
    assert (request.continue_final_message, request.fold_system) == (True, True)
    assert 0 < generator.seconds[0] <= 7


@pytest.mark.parametrize("prompt", ["Hello", ["Hello"], [1, 2, 3], [[1, 2, 3]]])
@pytest.mark.parametrize("path", [RELEASE, PREFETCH])
async def test_a_prompt_is_text_or_token_ids(path: str, prompt: Any) -> None:
    generator = Scripted(hello)
    status, answer = await post(generator, path, {"prompt": prompt})
    assert (status, answer["object"], answer["blocks"]) == (200, path.removeprefix("/v1/").replace("/", "."), 1)
    assert generator.requests[0].prompt in ("Hello", (1, 2, 3))


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (KEEP, {"prompt": "x"}, "keep_for"),
        (KEEP, {"prompt": "x", "keep_for": 0}, "keep_for"),
        (KEEP, {"prompt": "x", "keep_for": 86_401}, "keep_for"),
        (KEEP, {"prompt": "x", "keep_for": "1m"}, "keep_for"),
        (RELEASE, {"prompt": "x", "keep_for": 5}, "keep_for"),
        (RELEASE, {}, "prompt"),
        (RELEASE, {"prompt": ["a", "b"]}, "prompt"),
        (RELEASE, {"prompt": ""}, "prompt"),
        (RELEASE, {"prompt": "x", "messages": HELLO}, "prompt"),
        (RELEASE, {"messages": []}, "messages"),
        (RELEASE, {"messages": [HELLO[0] | {"tool_call_id": "1"}]}, "messages[0].tool_call_id"),
        (PREFETCH, {"prompt": "x", "namespace": "another"}, "namespace"),
        (PREFETCH, {"prompt": "x", "cache_salt": "s" * 129}, "cache_salt"),
        (PREFETCH, {"prompt": "x", "temperature": 0}, "temperature"),
    ],
)
async def test_what_is_out_of_bounds_is_refused_by_field(path: str, body: dict[str, Any], field: str) -> None:
    generator = Scripted(hello)
    status, answer = await post(generator, path, body)
    assert (status, answer["error"]["param"], generator.requests) == (400, field, [])


async def test_advice_passes_the_gate_like_everything_else() -> None:
    status, _ = await post(Scripted(hello), RELEASE, {"prompt": "x"}, Gate(0))
    assert status == 429
