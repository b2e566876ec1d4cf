"""What the HTTP door accepts, what it refuses, and what becomes of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.gateway.json_text import decode, encode
from services.router.gateway.parse import Asked, parse_chat, parse_completion
from services.router.gateway.schema import ChatBody, CompletionBody
from twostroke.access.caller import Caller
from twostroke.errors import InvalidRequest
from twostroke.types import CachePolicy, GenerateRequest, Message, Priority

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]


def read(parse: Any, body: dict[str, Any]) -> Asked:
    """As the door does: through JSON, where null becomes absent."""
    return parse(decode(encode(body)), "req-1", Caller())


def chat(**body: Any) -> GenerateRequest:
    (request,) = read(parse_chat, {"messages": HELLO} | body).requests
    return request


def completion(**body: Any) -> GenerateRequest:
    (request,) = read(parse_completion, {"prompt": "x"} | body).requests
    return request


def test_an_absent_parameter_has_the_default_of_the_api() -> None:
    request = chat()
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.0, 0.0, 1.0)
    assert sampling.logprobs is None
    assert (request.max_tokens, request.min_tokens, request.n, request.model) == (None, 0, 1, "default")
    assert not request.ignore_eos
    assert not request.stop_strings
    assert not request.stop_token_ids
    assert (request.context.priority, request.context.cache_policy) == (Priority.STANDARD, CachePolicy.READ_WRITE)
    assert request.context.request_id == "req-1"


def test_null_means_absent_everywhere() -> None:
    nulls = dict.fromkeys(ChatBody.model_fields.keys() - {"messages"}) | dict.fromkeys(("tools", "user", "audio"))
    nulls["stream_options"] = None
    message = HELLO[0] | {"name": None, "tool_calls": None, "refusal": None, "audio": None, "annotations": None}
    assert chat(**nulls | {"messages": [message], "seed": 1}) == chat(seed=1)
    nulls = dict.fromkeys(CompletionBody.model_fields.keys() - {"prompt"}) | dict.fromkeys(("suffix", "best_of"))
    assert completion(**nulls | {"seed": 1}) == completion(seed=1)


def test_every_parameter_arrives() -> None:
    request = chat(
        model="tiny",
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        repetition_penalty=1.1,
        logit_bias={"17": -100, "3": 1.5},
        seed=2**64 - 1,
        logprobs=True,
        top_logprobs=4,
        n=3,
        stop=["a", "b"],
        stop_token_ids=[7, 8],
        ignore_eos=True,
        priority="batch",
        cache_policy="bypass",
        cache_salt="salt",
        prompt_cache_key="session-1",
    )
    sampling, context = request.sampling, request.context
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.2, -0.3, 1.1)
    assert sampling.logit_bias == {17: -100.0, 3: 1.5}
    assert (sampling.seed, sampling.logprobs) == (2**64 - 1, 4)
    assert (request.model, request.max_tokens, request.min_tokens, request.n) == ("tiny", 9, 2, 3)
    assert (request.stop_strings, request.stop_token_ids, request.ignore_eos) == (("a", "b"), {7, 8}, True)
    assert (context.priority, context.cache_policy) == (Priority.BATCH, CachePolicy.BYPASS)
    assert (context.salt, context.session) == ("salt", "session-1")


def test_content_is_text_or_a_list_of_text_parts() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "developer", "content": "Be brief", "name": "ops"}, {"role": "user", "content": parts}]
    assert chat(messages=messages).prompt == (
        Message(role="developer", content="Be brief", name="ops"),
        Message(role="user", content="Hello"),
    )


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
    ],
)
def test_a_prompt_has_four_forms(prompt: Any, prompts: list[Any]) -> None:
    assert [each.prompt for each in read(parse_completion, {"prompt": prompt}).requests] == prompts


def test_several_prompts_count_their_seeds_and_request_ids_up() -> None:
    asked = read(parse_completion, {"prompt": ["a", "b", "c"], "seed": 2**64 - 2, "n": 2})
    assert [each.sampling.seed for each in asked.requests] == [2**64 - 2, 2**64 - 1, 0]
    assert [each.context.request_id for each in asked.requests] == ["req-1-0", "req-1-1", "req-1-2"]
    assert asked.choices == 6


def test_unseeded_requests_get_different_seeds() -> None:
    assert chat().sampling.seed != chat().sampling.seed


@pytest.mark.parametrize(("body", "logprobs"), [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0)])
def test_chat_logprobs_are_a_switch(body: dict[str, Any], logprobs: int | None) -> None:
    assert chat(**body).sampling.logprobs == logprobs
    assert completion(logprobs=3).sampling.logprobs == 3


@pytest.mark.parametrize(
    "body",
    [{"max_completion_tokens": 7}, {"max_tokens": 7}, {"max_completion_tokens": 7, "max_tokens": 7}],
)
def test_max_tokens_has_two_names(body: dict[str, Any]) -> None:
    assert chat(**body).max_tokens == 7


def test_continuing_a_message_decides_the_generation_prompt() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Hi"}]
    assert chat(messages=messages, continue_final_message=True).continue_final_message
    assert chat(messages=messages, continue_final_message=True, add_generation_prompt=False).continue_final_message
    assert not chat(add_generation_prompt=True).continue_final_message


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [], "tool_choice": "none", "functions": [], "function_call": "none"},
        {"response_format": {"type": "text"}, "modalities": ["text"], "service_tier": "auto", "store": False},
        {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "parallel_tool_calls": True},
        {"messages": [HELLO[0] | {"tool_calls": [], "annotations": []}]},
    ],
)
def test_what_asks_for_nothing_changes_nothing(body: dict[str, Any]) -> None:
    assert chat(**body, seed=1) == chat(seed=1)
    assert completion(echo=False, best_of=1, suffix="", seed=1) == completion(seed=1)


@pytest.mark.parametrize(
    ("options", "end", "every"),
    [
        (None, False, False),
        ({}, False, False),
        ({"include_usage": True}, True, False),
        ({"include_obfuscation": False}, False, False),
        ({"continuous_usage_stats": True}, True, True),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
    ],
)
def test_continuous_usage_includes_the_last_one(options: Any, end: bool, every: bool) -> None:
    asked = read(parse_chat, {"messages": HELLO, "stream": True, "stream_options": options})
    assert (asked.stream, asked.usage_at_end, asked.usage_on_every_chunk) == (True, end, every)


CHAT_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [HELLO[0], {"role": "assistant", "content": None}]}, "messages[1].content"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
    ({"messages": [HELLO[0] | {"tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls"),
    ({"messages": [HELLO[0] | {"tool_call_id": "1"}]}, "messages[0].tool_call_id"),
    ({"messages": [HELLO[0] | {"mood": "glad"}]}, "messages[0].mood"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 100_000}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": list(range(65))}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "1"}}, "logit_bias.1"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"often": True}}, "stream_options.often"),
    ({"priority": "urgent"}, "priority"),
    ({"prompt_cache_key": "k" * 129}, "prompt_cache_key"),
    ({"cache_salt": "k" * 129}, "cache_salt"),
    ({"model": "m" * 129}, "model"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"max_token": 5}, "max_token"),
    ({"prompt": "x"}, "prompt"),
]
COMPLETION_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": ["a"] * 65}, "prompt"),
    ({"prompt": ["a"] * 64, "n": 3}, "n"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": True}, "echo"),
    ({"echo": 0}, "echo"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"messages": HELLO}, "messages"),
]


@pytest.mark.parametrize(("body", "field"), CHAT_REFUSALS, ids=lambda value: str(value)[:40])
def test_a_chat_request_out_of_bounds_is_refused_by_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**body)
    assert caught.value.field == field
    assert field in caught.value.message


@pytest.mark.parametrize(("body", "field"), COMPLETION_REFUSALS, ids=lambda value: str(value)[:40])
def test_a_completion_request_out_of_bounds_is_refused_by_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**body)
    assert caught.value.field == field
    assert field in caught.value.message


def test_a_refusal_never_repeats_the_prompt() -> None:
    for body in ({"messages": [{"role": "secret", "content": "secret"}]}, {"messages": HELLO, "n": "secret"}):
        with pytest.raises(InvalidRequest) as caught:
            read(parse_chat, body)
        assert "secret" not in str(caught.value)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(sorted({*ChatBody.model_fields, *CompletionBody.model_fields, "tools", "echo", "user"}))


@given(st.dictionaries(names, values, max_size=4), st.sampled_from([parse_chat, parse_completion]))
def test_whatever_comes_is_either_understood_or_refused(body: dict[str, Any], parse: Any) -> None:
    good = {"messages": HELLO} if parse is parse_chat else {"prompt": "x"}
    try:
        choices, field = parse(copy.deepcopy(good | body), "req-1", Caller()).choices, None
    except InvalidRequest as refusal:
        choices, field = None, refusal.field
    assert field or 1 <= choices <= 128
