"""Prompts at the HTTP door: what is empty, too long, or refused by the model's chat template."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.support.chat_templates import MISTRAL_CHAT
from tests.support.saying import CHAT, COMPLETIONS, USER, Saying, asking, model
from tests.support.script import MODEL, served
from tests.support.tiny_tokenizer import IM_START, VOCAB_SIZE

SYSTEM, ASSISTANT = {"role": "system", "content": "S"}, {"role": "assistant", "content": "A"}
TOOL = {"role": "tool", "content": "T"}


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], [[1], []]])
async def test_an_empty_prompt_is_refused_by_name_and_the_next_request_is_served(tmp_path, prompt: Any) -> None:
    async with asking(Saying(model(tmp_path), "x")) as caller:
        status, told = await caller.whole(COMPLETIONS, prompt=prompt)
        assert (status, told["error"]["param"]) == (400, "prompt")
        assert (await caller.whole(COMPLETIONS))[0] == 200


async def test_an_empty_conversation_is_refused_by_name_and_the_next_request_is_served(tmp_path) -> None:
    async with asking(Saying(model(tmp_path), "x")) as caller:
        status, told = await caller.whole(CHAT, messages=[])
        assert (status, told["error"]["param"]) == (400, "messages")
        assert (await caller.whole(CHAT))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [None, 1, 300])
@pytest.mark.parametrize("length", [255, 256, 257, 10_000])
async def test_what_cannot_fit_the_context_is_refused_before_the_first_byte(
    tmp_path, length: int, max_tokens: int | None, stream: bool
) -> None:
    body = {"prompt": "a" * length, "max_tokens": max_tokens, "stream": stream}
    async with asking(Saying(model(tmp_path), "xyz")) as caller:
        if length == 255 and max_tokens != 300:
            assert (await caller.both(COMPLETIONS, prompt=body["prompt"], max_tokens=max_tokens))[1:] == ("x", "length")
            return
        status, told = await caller.whole(COMPLETIONS, **body)
    error = told["error"]
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "context_length_exceeded")
    assert error["param"] == ("max_tokens" if length == 255 else "prompt")
    assert str(length) in error["message"]
    assert "256" in error["message"]
    assert "-" not in error["message"]


async def test_a_long_conversation_is_refused_and_never_cut(tmp_path) -> None:
    system, question = {"role": "system", "content": "s" * 400}, {"role": "user", "content": "q" * 400}
    async with asking(Saying(model(tmp_path, context=512), "x")) as caller:
        status, told = await caller.whole(CHAT, messages=[system, question])
        assert (status, told["error"]["param"], told["error"]["code"]) == (400, "messages", "context_length_exceeded")
        status, told = await caller.whole(COMPLETIONS, prompt="s" * 400 + "q" * 400)
        assert (status, told["error"]["param"], told["error"]["code"]) == (400, "prompt", "context_length_exceeded")
        status, answer = await caller.whole(CHAT, messages=[system, USER])
    framed = len("system\n" + "\n" + "user\n" + "\n" + "assistant\n") + 5  # and five control tokens
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 400 + len(USER["content"]) + framed)


async def test_the_name_of_a_limit_is_the_one_that_the_caller_used(tmp_path) -> None:
    async with asking(Saying(model(tmp_path), "x")) as caller:
        for name in ("max_tokens", "max_completion_tokens"):
            _, told = await caller.whole(CHAT, **{name: 300})
            assert (told["error"]["code"], told["error"]["param"]) == ("context_length_exceeded", name)
            assert f"{name} is 300" in told["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([SYSTEM, USER], "roles must alternate"),
        ([USER, USER], "roles must alternate"),
        ([SYSTEM], "roles must alternate"),
        ([USER, TOOL], "Only user and assistant roles are supported!"),
    ],
    ids=["system first", "user twice", "system only", "tool"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_template_that_refuses_the_messages_is_a_400_in_its_own_words(
    tmp_path, messages: Any, words: str, stream: bool
) -> None:
    async with asking(Saying(model(tmp_path, MISTRAL_CHAT.source.replace("bos_token", "''")), "x")) as caller:
        status, told = await caller.whole(CHAT, messages=messages, stream=stream)
    assert (status, told["error"]["type"], told["error"]["param"]) == (400, "invalid_request_error", "messages")
    assert words in told["error"]["message"]


async def test_a_final_assistant_message_is_continued_when_asked_for(tmp_path) -> None:
    async with asking(Saying(model(tmp_path), "x")) as caller:
        _, answered = await caller.whole(CHAT, messages=[USER, ASSISTANT])
        _, continued = await caller.whole(CHAT, messages=[USER, ASSISTANT], continue_final_message=True)
        status, told = await caller.whole(CHAT, messages=[USER], continue_final_message=True)
    dropped = len("\n" + "assistant\n" + "\n") + 2  # the end of that turn and the start of another
    tokens = [each["usage"]["prompt_tokens"] for each in (answered, continued)]
    assert tokens[0] - tokens[1] == dropped - 1
    assert (status, told["error"]["param"]) == (400, "continue_final_message")


async def test_names_of_control_tokens_are_text_in_a_message_and_tokens_in_a_prompt(tmp_path) -> None:
    name = "<|im_start|>"
    async with asking(Saying(model(tmp_path), "x")) as caller:
        _, named = await caller.whole(CHAT, messages=[{"role": "user", "content": name}])
        _, plain = await caller.whole(CHAT, messages=[{"role": "user", "content": "x" * len(name)}])
        _, raw = await caller.whole(COMPLETIONS, prompt=name)
        _, ids = await caller.whole(COMPLETIONS, prompt=[IM_START])
    assert named["usage"] == plain["usage"]
    assert raw["usage"]["prompt_tokens"] == ids["usage"]["prompt_tokens"] == 1


@pytest.mark.parametrize("name", ["default", None, MODEL.id])
async def test_the_answer_names_the_model_that_gave_it_whatever_it_was_asked_as(tmp_path, name: str | None) -> None:
    async with asking(Saying(model(tmp_path), "x")) as caller:
        _, answer = await caller.whole(CHAT, model=name)
    assert (answer["model"], answer["system_fingerprint"]) == (MODEL.id, MODEL.fingerprint)


async def test_a_model_that_is_not_served_is_not_found(tmp_path) -> None:
    async with (
        served(Saying(model(tmp_path), "x")) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            await client.completions.create(model="other", prompt="x")
    assert (caught.value.param, MODEL.id in caught.value.message) == ("model", True)


@pytest.mark.parametrize(
    "body", [{"prompt": [VOCAB_SIZE]}, {"prompt": [-1]}, {"stop_token_ids": [999]}, {"logit_bias": {"999": 1}}]
)
async def test_a_token_id_outside_the_vocabulary_is_refused_by_field(tmp_path, body: dict[str, Any]) -> None:
    async with asking(Saying(model(tmp_path), "x")) as caller:
        status, told = await caller.whole(COMPLETIONS, **body)
    assert (status, told["error"]["param"]) == (400, next(iter(body)))
