"""The HTTP door as its clients see it: a real server, the real OpenAI client and a plain one."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from tests.support.script import MODEL, PROMPT_TOKENS, Scripted, delta, frames, hello, said, sdk, served, started
from twostroke.types import FinishReason, Token

HELLO = [{"role": "user", "content": "Hello"}]
EMOJI = "ab\N{GRINNING FACE}\N{CJK UNIFIED IDEOGRAPH-4E2D}"


async def test_a_chat_answer_has_every_field_of_the_api() -> None:
    async with sdk(Scripted(hello)) as client:
        answer = await client.chat.completions.create(model="default", messages=HELLO, seed=7)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert (answer.model, answer.system_fingerprint) == (MODEL.id, MODEL.fingerprint)
    (choice,) = answer.choices
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", "Hello!")
    assert (choice.finish_reason, choice.logprobs, choice.message.refusal) == ("stop", None, None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 6, 11)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_a_streamed_chat_starts_with_the_role_and_never_sends_empty_content_again() -> None:
    async with sdk(Scripted(lambda request: said(request, "", "Hel", "", "lo", "!", ""))) as client:
        stream = await client.chat.completions.create(model="default", messages=HELLO, stream=True)
        chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert [each.content for each in deltas[1:]] == ["Hel", "lo", "!", None]
    assert all(each.role is None for each in deltas[1:])
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 4 + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" and chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize(
    ("path", "body"), [("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "x"})]
)
async def test_a_stream_ends_with_done(path: str, body: dict[str, Any]) -> None:
    async with served(Scripted(hello)) as url:
        assert (await frames(url, f"/v1/{path}", body))[-1] == "[DONE]"


async def test_joined_streams_equal_whole_answers_for_every_choice() -> None:
    async with sdk(Scripted(hello)) as client:
        whole = await client.completions.create(model="default", prompt="x", n=3)
        texts = dict.fromkeys(range(3), "")
        async for chunk in await client.completions.create(model="default", prompt="x", n=3, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {choice.index: choice.text for choice in whole.choices} == dict.fromkeys(range(3), "Hello!")


async def test_without_stream_options_no_chunk_speaks_of_usage() -> None:
    async with served(Scripted(hello)) as url:
        chunks = (await frames(url, "/v1/chat/completions", {"messages": HELLO}))[:-1]
    assert all("usage" not in chunk for chunk in chunks)
    assert all(chunk["choices"] for chunk in chunks)


async def test_usage_when_asked_for_comes_once_in_a_last_chunk_without_choices() -> None:
    body = {"messages": HELLO, "n": 2, "stream_options": {"include_usage": True}}
    async with served(Scripted(hello)) as url:
        *chunks, last = (await frames(url, "/v1/chat/completions", body))[:-1]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == PROMPT_TOKENS
    assert last["usage"]["completion_tokens"] == 12
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3, "local_tokens": 1, "store_tokens": 2}


async def test_continuous_usage_counts_on_every_chunk_and_at_the_end() -> None:
    body = {"messages": HELLO, "n": 2, "stream_options": {"continuous_usage_stats": True}}
    async with served(Scripted(hello)) as url:
        *chunks, last = (await frames(url, "/v1/chat/completions", body))[:-1]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [0, 0, 3, 6, 8, 10, 11, 12, 12, 12]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {PROMPT_TOKENS}
    assert last["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("stream", [False, True])
async def test_the_bytes_of_all_logprobs_joined_are_the_text(stream: bool) -> None:
    def halves(request: Any) -> Any:
        """Characters come when their last byte has come: the deltas before have tokens and no text."""
        data = said(request, EMOJI)
        tokens = data[1].tokens
        parts = [delta("", tokens[:4]), delta("ab\N{GRINNING FACE}", tokens[4:7]), delta(EMOJI[-1:], tokens[7:9])]
        return [data[0], *parts, *data[2:]]

    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    entries: list[Any] = []
    async with sdk(Scripted(halves)) as client:
        answer: Any = await client.chat.completions.create(model="default", messages=HELLO, stream=stream, **options)
        if stream:
            async for chunk in answer:
                if chunk.choices[0].logprobs:
                    entries += chunk.choices[0].logprobs.content
        else:
            entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == EMOJI
    assert [entry.token for entry in entries[:3]] == ["a", "b", r"bytes:\xf0"]
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs_point_at_their_characters(stream: bool) -> None:
    body = {"prompt": "x", "logprobs": 1}
    async with served(Scripted(lambda request: said(request, "ab", EMOJI[2], "c"))) as url:
        if stream:
            chunks = (await frames(url, "/v1/completions", body))[:-1]
            parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
        else:
            async with aiohttp.ClientSession(url) as http, http.post("/v1/completions", json=body) as response:
                parts = [(await response.json())["choices"][0]["logprobs"]]
    assert [offset for part in parts for offset in part["text_offset"]] == [0, 1, 2, 2, 2, 2, 3]
    assert [name for part in parts for name in part["tokens"]][:2] == ["a", "b"]
    assert all(len(part["tokens"]) == len(part["token_logprobs"]) == len(part["top_logprobs"]) for part in parts)


async def test_a_control_token_has_no_bytes_and_an_impossible_one_a_finite_logprob() -> None:
    def ending(request: Any) -> Any:
        return [started(request), delta("x", [Token(256, float("-inf"))]), *said(request)[1:]]

    async with sdk(Scripted(ending)) as client:
        answer = await client.chat.completions.create(model="default", messages=HELLO, logprobs=True)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    (entry,) = answer.choices[0].logprobs.content
    assert (entry.token, entry.bytes, entry.logprob) == ("<|end|>", [], -9_999.0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_list_of_prompts_is_answered_in_its_order_and_counted_in_all(stream: bool) -> None:
    def echo(request: Any) -> Any:
        return said(request, str(request.prompt), reason=FinishReason.LENGTH)

    prompts = [f"p{number:02}" for number in range(20)]
    generator = Scripted(echo)
    texts = dict.fromkeys(range(40), "")
    options: Any = {"stream_options": {"include_usage": True}} if stream else {}
    async with sdk(generator) as client:
        answer: Any = await client.completions.create(model="default", prompt=prompts, n=2, stream=stream, **options)
        if stream:
            async for chunk in answer:
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
                usage = chunk.usage
        else:
            texts = {choice.index: choice.text for choice in answer.choices}
            usage = answer.usage
    assert [texts[index] for index in range(40)] == [prompt for prompt in prompts for _ in range(2)]
    assert (usage.prompt_tokens, usage.completion_tokens) == (20 * PROMPT_TOKENS, 40 * 3)
    assert len({request.context.request_id for request in generator.requests}) == 20
    assert len({request.sampling.seed for request in generator.requests}) == 20


async def test_eight_of_many_prompts_run_at_once() -> None:
    together = asyncio.Barrier(8)  # nobody passes until eight are there
    generator = Scripted(lambda request: [started(request), together, *hello(request)[1:]])
    async with sdk(generator) as client:
        answer = await client.completions.create(model="default", prompt=["x"] * 24)
    assert len(answer.choices) == 24
    assert generator.most_open == 8


async def test_the_seed_in_the_header_replays_an_unseeded_request() -> None:
    generator = Scripted(hello)
    async with served(generator) as url, aiohttp.ClientSession(url) as http:
        prompts = {"prompt": ["a", "b"]}
        async with http.post("/v1/completions", json=prompts) as first:
            seed = int(first.headers["x-twostroke-seed"])
        async with http.post("/v1/completions", json=prompts | {"seed": seed}) as second:
            assert second.headers["x-twostroke-seed"] == str(seed)
    seeds = {(request.prompt, request.sampling.seed) for request in generator.requests}
    assert seeds == {("a", seed), ("b", seed + 1)}
