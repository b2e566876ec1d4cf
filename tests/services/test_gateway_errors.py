"""How failures reach a client of the HTTP door: as a status before the first byte, as an event after it."""

from __future__ import annotations

from typing import Any

import aiohttp
import openai
import pytest

from tests.support.script import Scripted, delta, frames, hello, sdk, served, started
from twostroke.errors import ContextTooLong, NotFound, Overloaded, WorkerLost
from twostroke.types import ChoiceFinished, Usage

HELLO = [{"role": "user", "content": "Hello"}]


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
        "cure": "ask for something that exists",
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
