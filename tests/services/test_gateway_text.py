"""Text of answers at the HTTP door: stop strings, characters that span tokens, log-probabilities."""

from __future__ import annotations

import pytest

from tests.support.saying import CHAT, COMPLETIONS, Saying, asking, model, text_of
from tests.support.tiny_tokenizer import IM_END

EMOJI, CJK = "\N{GRINNING FACE}", "\N{CJK UNIFIED IDEOGRAPH-4E2D}"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_no_part_of_a_stop_string_is_ever_sent(tmp_path, path: str) -> None:
    async with asking(Saying(model(tmp_path), "a", "KL", "M", "NO", "P", "and more")) as caller:
        pieces, text, reason = await caller.both(path, stop=["KLMNOP"])
    assert (pieces, text, reason) == (["a"], "a", "stop")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_text_that_only_began_like_a_stop_string_is_sent_once_it_cannot_become_one(tmp_path, path: str) -> None:
    async with asking(Saying(model(tmp_path), "KL", "M", "x", "KLM")) as caller:
        pieces, text, reason = await caller.both(path, stop="KLMNOP")
    assert (pieces, text, reason) == (["KLMx", "KLM"], "KLMxKLM", "stop")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stop_string_that_shares_no_prefix_delays_nothing_and_empties_no_delta(tmp_path, path: str) -> None:
    said = ["plain ", "text, ", "piece ", "by ", "piece"]
    async with asking(Saying(model(tmp_path), *said)) as caller:
        choices = await caller.chunks(path, stop=["<END_OF_ANSWER_MARKER>"])
    texts = [text_of(choice) for choice in choices]
    opening, closing = ([""], [None]) if path == CHAT else ([], [""])  # the role; the finish reason
    assert texts == [*opening, *said, *closing]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stop_string_waits_for_min_tokens(tmp_path, path: str) -> None:
    async with asking(Saying(model(tmp_path), "one.", "two.", "three.")) as caller:
        assert (await caller.both(path, stop="."))[1:] == ("one", "stop")
        assert (await caller.both(path, stop=".", min_tokens=4))[1:] == ("one.two", "stop")
        assert (await caller.both(path, stop=".", min_tokens=6, max_tokens=6))[1:] == ("one.tw", "length")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_characters_that_span_tokens_arrive_whole(tmp_path, path: str) -> None:
    raw = f"{EMOJI}{CJK}!".encode()
    async with asking(Saying(model(tmp_path), raw[:2], raw[2:4], raw[4:6], raw[6:])) as caller:
        pieces, _, _ = await caller.both(path)
    assert pieces == [EMOJI, f"{CJK}!"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_answer_cut_inside_a_character_ends_with_one_replacement(tmp_path, path: str) -> None:
    async with asking(Saying(model(tmp_path), "ab", EMOJI)) as caller:
        assert (await caller.both(path, max_tokens=4))[1:] == ("ab\ufffd", "length")


async def test_the_bytes_of_a_character_of_four_tokens_join_to_it_and_alternatives_stand_alone(tmp_path) -> None:
    raw = EMOJI.encode()
    async with asking(Saying(model(tmp_path), raw[:3], raw[3:])) as caller:
        chunks = await caller.chunks(CHAT, logprobs=True, top_logprobs=5)
        _, answer = await caller.whole(CHAT, logprobs=True, top_logprobs=5)
    streamed = [entry for choice in chunks if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert streamed == answer["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in streamed for byte in entry["bytes"]) == raw
    assert [entry["token"] for entry in streamed] == [f"bytes:\\x{byte:02x}" for byte in raw]
    for entry in streamed:
        assert [each["bytes"] for each in entry["top_logprobs"]] == [[entry["bytes"][0] + at] for at in range(5)]


async def test_text_of_a_stop_string_is_not_shown_but_its_tokens_are_counted(tmp_path) -> None:
    async with asking(Saying(model(tmp_path), "ab", "END")) as caller:
        _, answer = await caller.whole(CHAT, stop="END", logprobs=True)
    assert answer["choices"][0]["message"]["content"] == "ab"
    assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["logprobs"]["content"]) == 5


async def test_an_end_token_counts_and_has_a_name_but_no_text(tmp_path) -> None:
    async with asking(Saying(model(tmp_path), "ab", [IM_END])) as caller:
        _, text, reason = await caller.both(CHAT)
        _, answer = await caller.whole(CHAT, logprobs=True)
    assert (text, reason, answer["usage"]["completion_tokens"]) == ("ab", "stop", 3)
    last = answer["choices"][0]["logprobs"]["content"][-1]
    assert (last["token"], last["bytes"]) == ("<|im_end|>", [])
