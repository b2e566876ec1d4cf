"""JSON at the HTTP door: strict on the way in, one line of ASCII on the way out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.gateway.json_text import decode, encode
from services.router.gateway.logprobs import characters, chat_logprobs, completion_logprobs, token_name
from twostroke.errors import InvalidRequest
from twostroke.types import Token


@given(
    st.binary(max_size=40) | st.text(alphabet='{}[]":,0123456789nulltruefalseINFA\\ud8', max_size=40).map(str.encode)
)
def test_any_bytes_are_an_object_or_refused(body: bytes) -> None:
    try:
        value = decode(body)
    except InvalidRequest:
        return
    assert isinstance(value, dict)


scalars = st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False)
objects = st.dictionaries(st.text(), st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=8))


@given(objects)
def test_what_is_written_is_read_back_and_is_one_line_of_ascii(value: dict[str, Any]) -> None:
    line = encode(value)
    assert decode(line) == value
    assert line.isascii()
    assert len(line.splitlines()) == 1


def test_null_members_are_absent_at_any_depth_and_null_items_stay() -> None:
    assert decode(b'{"a": null, "b": {"c": null, "d": [null, {"e": null}]}}') == {"b": {"d": [None, {}]}}


def test_a_surrogate_pair_is_a_character_and_half_of_one_is_not() -> None:
    assert decode(rb'{"a": "\ud83d\ude00"}') == {"a": "\N{GRINNING FACE}"}
    for half in (rb'{"a": "\ud83d"}', rb'{"\ude00": 1}', rb'{"a": ["\uD83D"]}'):
        with pytest.raises(InvalidRequest, match="Unicode"):
            decode(half)


def test_nothing_that_json_lacks_is_ever_written() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        encode({"a": float("nan")})


class Paper:
    """A token a byte; the last one is a control token, and what is beyond stands for nothing."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 255 else b""

    def control_name(self, token_id: int) -> str | None:
        return "<|end|>" if token_id == 255 else None


PAPER = Paper()


@given(st.text(max_size=20))
def test_chat_logprobs_hold_the_exact_bytes(text: str) -> None:
    told = json.loads(encode(chat_logprobs([Token(byte, -1.0) for byte in text.encode()], PAPER)))
    assert bytes(byte for entry in told["content"] for byte in entry["bytes"]).decode() == text


@given(st.text(max_size=20), st.integers(min_value=0, max_value=20))
def test_completion_offsets_do_not_depend_on_where_the_stream_is_cut(text: str, cut: int) -> None:
    tokens = [Token(byte, -1.0) for byte in text.encode()]
    whole = completion_logprobs(tokens, PAPER, 0)
    before = sum(characters(PAPER.token_bytes(token.id)) for token in tokens[:cut])
    parts = [completion_logprobs(tokens[:cut], PAPER, 0), completion_logprobs(tokens[cut:], PAPER, before)]
    assert whole["text_offset"] == [offset for part in parts for offset in part["text_offset"]]
    positions = [index for index, character in enumerate(text) for _ in character.encode()]
    assert whole["text_offset"] == positions


def test_every_token_has_a_name() -> None:
    assert token_name(PAPER, ord("a")) == "a"
    assert token_name(PAPER, 0xF0) == r"bytes:\xf0"
    assert token_name(PAPER, 255) == "<|end|>"
    assert token_name(PAPER, 300) == "token_id:300"


def test_of_alternatives_with_the_same_text_the_likelier_one_is_told() -> None:
    class Twins(Paper):
        def token_bytes(self, token_id: int) -> bytes:
            return b"a"

    token = Token(3, -2.5, ((1, -0.5), (2, -1.5)))
    assert completion_logprobs([token], Twins(), 0)["top_logprobs"] == [{"a": -0.5}]
    assert completion_logprobs([token], PAPER, 0)["top_logprobs"] == [{"\x01": -0.5, "\x02": -1.5, "\x03": -2.5}]
