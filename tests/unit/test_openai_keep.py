"""For how long a request over HTTP asks to keep its blocks."""

from __future__ import annotations

from typing import Any

import pytest

from services.router.gateway.json_text import decode, encode
from services.router.gateway.parse import parse_chat, parse_completion
from twostroke.access.caller import Caller
from twostroke.errors import InvalidRequest

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]


def chat(**told: Any) -> float | None:
    return parse_chat(decode(encode({"messages": HELLO} | told)), "req-1", Caller()).requests[0].keep_for


def test_blocks_are_kept_for_as_long_as_is_asked() -> None:
    assert chat() is None
    assert chat(keep_for=90) == 90.0
    assert chat(prompt_cache_retention="24h") == 86_400.0
    prompts = parse_completion({"prompt": ["a", "b"], "keep_for": 90.0}, "req-1", Caller()).requests
    assert [each.keep_for for each in prompts] == [90.0, 90.0]


@pytest.mark.parametrize(
    ("told", "field"),
    [
        ({"keep_for": 0}, "keep_for"),
        ({"keep_for": 86_401}, "keep_for"),
        ({"keep_for": "90"}, "keep_for"),
        ({"keep_for": 1, "cache_policy": "bypass"}, "keep_for"),
        ({"keep_for": 1, "prompt_cache_retention": "24h"}, "keep_for"),
        ({"prompt_cache_retention": "in_memory"}, "prompt_cache_retention"),
        ({"prompt_cache_retention": "24h", "cache_policy": "bypass"}, "prompt_cache_retention"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_field(told: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**told)
    assert caught.value.field == field
