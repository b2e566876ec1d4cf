"""Bodies that try to make reading them expensive: every refusal is short and comes at the first fault."""

from __future__ import annotations

from typing import Any

import pytest

from services.router.gateway.json_text import MAX_MEMBERS, decode
from services.router.gateway.parse import parse_chat, parse_completion
from twostroke.access.caller import Caller
from twostroke.errors import InvalidRequest

HUGE = 10**400  # no float can hold it
HELLO = {"role": "user", "content": "Hello"}
MANY = 200_000


def refusal(body: dict[str, Any], parse: Any = parse_chat) -> InvalidRequest:
    good = {"messages": [HELLO]} if parse is parse_chat else {"prompt": "x"}
    with pytest.raises(InvalidRequest) as caught:
        parse(good | body, "req-1", Caller())
    assert len(caught.value.message) < 400
    return caught.value


@pytest.mark.parametrize("name", ["seed", "top_k", "n", "max_tokens", "max_completion_tokens", "min_tokens"])
@pytest.mark.parametrize("sign", [1, -1])
def test_an_integer_that_no_float_can_hold_is_refused_by_field(name: str, sign: int) -> None:
    error = refusal({name: sign * HUGE})
    assert error.field == name
    assert "an integer of 1329 bits" in error.message


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_a_number_that_is_not_finite_is_refused_by_field(name: str) -> None:
    assert refusal(decode(f'{{"{name}": 1e999}}'.encode())).field == name
    assert refusal({name: HUGE}).field == name


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": [{}] * MANY}, "messages[0].role"),
        ({"messages": [HELLO] * MANY}, "messages"),
        ({"messages": [{"role": "user", "content": [{}] * MANY}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * MANY}]}, "messages[0].content"),
        ({"stop": [1] * MANY}, "stop[0]"),
        ({"stop": ["a"] * MANY}, "stop"),
        ({"stop_token_ids": ["a"] * MANY}, "stop_token_ids[0]"),
        ({"stop_token_ids": list(range(MANY))}, "stop_token_ids"),
        ({"logit_bias": {str(token): 1 for token in range(MAX_MEMBERS)}}, "logit_bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_list_is_refused_at_its_first_fault_or_for_its_length(body: dict[str, Any], field: str) -> None:
    assert refusal(body).field == field


@pytest.mark.parametrize("prompt", [["a"] * MANY, [[1]] * MANY, [1] * (2 << 20), "a" * (9 << 20)])
def test_a_prompt_is_refused_for_its_length(prompt: Any) -> None:
    assert refusal({"prompt": prompt}, parse_completion).field == "prompt"


def test_an_object_with_thousands_of_members_is_refused() -> None:
    members = ",".join(f'"{number}":0' for number in range(MAX_MEMBERS + 1))
    with pytest.raises(InvalidRequest, match="more than 2048 members"):
        decode(f"{{{members}}}".encode())


def test_the_name_of_an_unknown_field_is_repeated_only_so_far() -> None:
    error = refusal({"k" * 1_000_000: 1})
    assert error.field == "k" * 128


@pytest.mark.parametrize("key", ["x", "-1", "01", "1.0", " 1", "\u0661", "1" * 11, ""])
def test_a_token_in_logit_bias_has_one_spelling(key: str) -> None:
    assert refusal({"logit_bias": {key: 1}}).field == "logit_bias"
