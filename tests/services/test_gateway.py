"""The HTTP door as its clients see it: a real server, the real OpenAI client and a plain one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest

from tests.support.script import MODEL, PROMPT_TOKENS, Scripted, delta, said, served, started
from twostroke.errors import ContextTooLong, NotFound, Overloaded, WorkerLost
from twostroke.types import ChoiceFinished, FinishReason, Token, Usage

HELLO = [{"role": "user", "content": "Hello"}]
EMOJI = "ab\N{GRINNING FACE}\N{CJK UNIFIED IDEOGRAPH-4E2D}"


@asynccontextmanager
async def sdk(generator: Scripted, **settings: float) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        served(generator, **settings) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def frames(url: str, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream; the last is the string [DONE] when the answer was complete."""
    async with aiohttp.ClientSession(url) as http, http.post(path, json=body | {"stream": True}) as response:
        assert response.status == 200
        lines = (await response.text()).split("\n\n")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


def hello(request: Any) -> Any:
    return said(request, "Hel", "lo", "!")


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
        return [started(request), delta("x", [Token(300, float("-inf"))]), *said(request)[1:]]

    async with sdk(Scripted(ending)) as client:
        answer = await client.chat.completions.create(model="default", messages=HELLO, logprobs=True)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    (entry,) = answer.choices[0].logprobs.content
    assert (entry.token, entry.bytes, entry.logprob) == ("", [], -9_999.0)


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
    assert generator.most_open <= 8
    assert len({request.context.request_id for request in generator.requests}) == 20
    assert len({request.sampling.seed for request in generator.requests}) == 20


async def test_one_bad_prompt_of_many_refuses_the_request_before_the_stream_opens() -> None:
    def picky(request: Any) -> Any:
        return [ContextTooLong("too long", field="prompt")] if request.prompt == "p19" else hello(request)

    generator = Scripted(picky)
    prompts = [f"p{number:02}" for number in range(20)]
    async with sdk(generator) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="default", prompt=prompts, stream=True)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert generator.open == generator.most_open == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_event_has_its_status(stream: bool) -> None:
    async with sdk(Scripted(lambda _: [NotFound("no model is called x", field="model")])) as client:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="x", messages=HELLO, stream=stream)
    assert caught.value.body == {
        "message": "no model is called x",
        "type": "invalid_request_error",
        "param": "model",
        "code": "not_found",
        "cure": "list what exists first",
    }


async def test_an_error_in_the_middle_of_a_stream_is_raised_by_the_client_and_nothing_says_done() -> None:
    def broken(request: Any) -> Any:
        return [started(request), delta("Hel"), WorkerLost("the worker ended")]

    async with sdk(Scripted(broken)) as client:
        stream = await client.chat.completions.create(model="default", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="the worker ended") as caught:
            async for _ in stream:
                pass
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["code"] == "worker_lost"
    async with served(Scripted(broken)) as url:
        events = await frames(url, "/v1/chat/completions", {"messages": HELLO})
    assert "error" in events[-1]


async def test_an_error_in_the_middle_of_a_whole_answer_has_its_status() -> None:
    script = Scripted(lambda request: [started(request), delta("Hel"), WorkerLost("the worker ended")])
    async with sdk(script) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="default", messages=HELLO)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["x-should-retry"] == "true"


@pytest.mark.parametrize(("hint", "header"), [(None, "1"), (0.2, "1"), (2.3, "3")])
async def test_overload_says_when_to_come_back(hint: float | None, header: str) -> None:
    async with sdk(Scripted(lambda _: [Overloaded("full", retry_after=hint)])) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="default", messages=HELLO)
    assert caught.value.response.headers["Retry-After"] == header


@pytest.mark.parametrize("stream", [False, True])
async def test_a_defect_is_logged_and_its_text_kept_from_the_caller(stream: bool, caplog) -> None:
    def defect(request: Any) -> Any:
        return [started(request), KeyError("secret prompt")]

    body = {"messages": HELLO, "stream": stream}
    async with (
        served(Scripted(defect)) as url,
        aiohttp.ClientSession(url) as http,
        http.post("/v1/chat/completions", json=body) as response,
    ):
        assert response.status == (200 if stream else 500)
        told = await response.text()
    assert "KeyError in the HTTP door" in told
    assert "secret" not in told
    assert "secret prompt" in caplog.text


@pytest.mark.parametrize("missing", [Usage, ChoiceFinished])
async def test_an_answer_that_lacks_its_end_is_never_passed_off_as_complete(missing: type) -> None:
    def short(request: Any) -> Any:
        return [step for step in hello(request) if not isinstance(step, missing)]

    async with sdk(Scripted(short)) as client:
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="default", messages=HELLO)
    async with served(Scripted(short)) as url:
        events = await frames(url, "/v1/chat/completions", {"messages": HELLO})
    assert events[-1]["error"]["code"] == "internal"


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
