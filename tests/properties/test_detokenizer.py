from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny_tokenizer import VOCAB_SIZE, write_tiny_tokenizer
from twostroke.text.detokenizer import Detokenizer
from twostroke.text.folder import bundle_from_folder
from twostroke.text.stops import StopMatcher, TextStream
from twostroke.text.tokenizer import Tokenizer

Item = TypeVar("Item")

TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1) | st.sampled_from(list("é中😀".encode())), max_size=40)
CUTS = st.lists(st.integers(0, 40))
TEXT = st.text(alphabet="ab<|é", max_size=30)
STOPS = st.lists(st.text(alphabet="ab<|é", min_size=1, max_size=5), max_size=4)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_tokenizer(folder)
    return Tokenizer(bundle_from_folder(folder))


def chunks(items: Sequence[Item], cuts: list[int]) -> list[Sequence[Item]]:
    edges = sorted({0, len(items), *(cut for cut in cuts if cut < len(items))})
    return [items[start:end] for start, end in itertools.pairwise(edges)]


def first_stop(text: str, stops: list[str], min_tokens: int = 0) -> int | None:
    """Where the stop string starts that ends first, found by trying every end: the definition.

    A token is a byte, and the first `min_tokens` of them complete none.
    """
    for end in range(1, len(text) + 1):
        if len(text[:end].encode()) <= min_tokens:
            continue
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


@given(ids=TOKENS, cuts=CUTS)
def test_streamed_text_is_the_text_of_all_ids(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer, after_text=False)
    streamed = "".join(detokenizer.push(chunk) for chunk in chunks(ids, cuts)) + detokenizer.finish()
    assert streamed == tokenizer.decode(ids)
    assert streamed == b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")


@given(text=TEXT, stops=STOPS, cuts=CUTS)
def test_a_stream_stops_where_the_whole_text_does(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    streamed = "".join(matcher.push(chunk) for chunk in chunks(text, cuts)) + matcher.finish()
    stop = first_stop(text, stops)
    assert streamed == text[:stop]
    assert matcher.stopped == (stop is not None)


@given(text=TEXT, stops=STOPS)
def test_only_the_beginning_of_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(map(matcher.push, text))
    held = text[len(shown) :]
    if not matcher.stopped and held:
        assert any(stop.startswith(held) and stop != held for stop in stops)


@given(text=TEXT, stops=STOPS, cuts=CUTS)
def test_a_token_stream_uses_the_same_tokens_in_any_chunks(
    tokenizer: Tokenizer, text: str, stops: list[str], cuts: list[int]
) -> None:
    ids = tokenizer.encode(text, allow_special=False)
    one_by_one, chunked = TextStream(tokenizer, stops), TextStream(tokenizer, stops)
    single = [one_by_one.push([id_]) for id_ in ids] + [one_by_one.finish()]
    joined = [chunked.push(chunk) for chunk in chunks(ids, cuts)] + [chunked.finish()]
    for deltas in (single, joined):
        assert "".join(delta.text for delta in deltas) == text[: first_stop(text, stops)]
    assert sum(delta.tokens_used for delta in single) == sum(delta.tokens_used for delta in joined)


@given(text=TEXT, stops=STOPS, cuts=CUTS, min_tokens=st.integers(0, 40))
def test_a_stop_string_ends_an_answer_only_after_its_least_number_of_tokens(
    tokenizer: Tokenizer, text: str, stops: list[str], cuts: list[int], min_tokens: int
) -> None:
    stream = TextStream(tokenizer, stops, min_tokens=min_tokens)
    ids = tokenizer.encode(text, allow_special=False)
    deltas = [stream.push(chunk) for chunk in chunks(ids, cuts)] + [stream.finish()]
    stop = first_stop(text, stops, min_tokens)
    assert "".join(delta.text for delta in deltas) == text[:stop]
    assert deltas[-1].stopped == (stop is not None)
    if stop is not None:
        assert sum(delta.tokens_used for delta in deltas) > min_tokens
