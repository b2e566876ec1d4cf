"""The answer in the making: what counts, what is shown, and in which messages it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.answer import Answer, Choice
from tests.support.tiny_tokenizer import write_tiny_tokenizer
from twostroke.text.folder import bundle_from_folder
from twostroke.text.tokenizer import Tokenizer
from twostroke.types import ChoiceFinished, Delta, FinishReason, Token

TEXT = "one, two, three, four"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return Tokenizer(bundle_from_folder(folder))


def tokens(text: str) -> list[Token]:
    """A token is a byte."""
    return [Token(byte) for byte in text.encode()]


def text_of(events: Sequence[Delta | ChoiceFinished]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def reasons(events: Sequence[Delta | ChoiceFinished]) -> list[FinishReason]:
    return [event.reason for event in events if isinstance(event, ChoiceFinished)]


def test_tokens_past_a_stop_string_are_dropped_and_not_counted(tokenizer: Tokenizer) -> None:
    choice = Choice(0, tokenizer, ["two"])
    choice.push(tokens(TEXT), FinishReason.LENGTH)
    events = choice.take()
    assert text_of(events) == "one, "
    assert reasons(events) == [FinishReason.STOP]
    assert bytes(choice.emitted).decode() == "one, two"
    assert isinstance(events[0], Delta)
    assert events[0].total_tokens == len(events[0].tokens) == len("one, two")


def test_what_comes_after_the_end_is_not_looked_at(tokenizer: Tokenizer) -> None:
    choice = Choice(0, tokenizer, ["two"])
    choice.push(tokens("one, two"), None)
    choice.push(tokens(" and more"), FinishReason.LENGTH)
    assert bytes(choice.emitted).decode() == "one, two"
    assert reasons(choice.take()) == [FinishReason.STOP]
    assert choice.take() == []


def test_a_half_matched_stop_string_is_held_back_and_shown_at_the_end(tokenizer: Tokenizer) -> None:
    choice = Choice(0, tokenizer, ["three!"])
    choice.push(tokens("one, three"), None)
    held = choice.take()
    choice.push((), FinishReason.LENGTH)
    rest = choice.take()
    assert (text_of(held), text_of(rest)) == ("one, ", "three")
    assert reasons(rest) == [FinishReason.LENGTH]
    assert isinstance(held[0], Delta)
    assert held[0].total_tokens == len("one, three")  # tokens leave at once, their text when it is sure


def test_no_stop_string_ends_an_answer_before_its_least_tokens(tokenizer: Tokenizer) -> None:
    choice = Choice(0, tokenizer, ["o"], min_tokens=6)
    choice.push(tokens(TEXT), FinishReason.LENGTH)
    assert text_of(choice.take()) == "one, tw"


def test_half_a_character_is_held_back(tokenizer: Tokenizer) -> None:
    choice, (first, second) = Choice(0, tokenizer, ()), tokens("é")
    choice.push([first], None)
    assert text_of(choice.take()) == ""
    choice.push([second], FinishReason.LENGTH)
    assert text_of(choice.take()) == "é"


@given(st.data())
def test_however_it_is_cut_the_answer_is_the_same(tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.text("aböc", max_size=12))
    stops = data.draw(st.lists(st.text("abö", min_size=1, max_size=3), max_size=2))
    whole = Choice(0, tokenizer, stops)
    whole.push(tokens(text), FinishReason.LENGTH)
    pieces, left, events = Choice(0, tokenizer, stops), tokens(text), []
    while left:
        size = data.draw(st.integers(1, len(left)))
        pieces.push(left[:size], FinishReason.LENGTH if size == len(left) else None)
        left = left[size:]
        if data.draw(st.booleans()):
            events += pieces.take()
    pieces.push((), FinishReason.LENGTH)
    events += pieces.take()
    deltas = [event for event in events if isinstance(event, Delta)]
    assert text_of(events) == text_of(whole.take())
    assert (pieces.emitted, pieces.finish) == (whole.emitted, whole.finish)
    assert [token.id for delta in deltas for token in delta.tokens] == pieces.emitted
    assert [delta.sequence for delta in deltas] == list(range(1, len(deltas) + 1))
    assert [delta.total_tokens for delta in deltas] == [
        sum(len(each.tokens) for each in deltas[: at + 1]) for at in range(len(deltas))
    ]
    assert reasons(events) == [pieces.finish]


async def test_tokens_gather_while_the_caller_is_busy(tokenizer: Tokenizer) -> None:
    answer = Answer(2, tokenizer, ())
    first, second = answer.choices
    for token in tokens("abc"):
        answer.push(first, (token,), None)
    answer.push(second, tokens("xy"), FinishReason.STOP)
    events = answer.events()
    told = [await anext(events) for _ in range(3)]
    assert told == [
        Delta(choice=0, sequence=1, text="abc", tokens=tuple(tokens("abc")), total_tokens=3),
        Delta(choice=1, sequence=1, text="xy", tokens=tuple(tokens("xy")), total_tokens=2),
        ChoiceFinished(1, FinishReason.STOP),
    ]
    assert answer.open == [first]
    assert answer.completion_tokens == 5
    answer.push(first, tokens("d"), FinishReason.LENGTH)
    answer.close()
    assert [event async for event in events] == [
        Delta(choice=0, sequence=2, text="d", tokens=tuple(tokens("d")), total_tokens=4),
        ChoiceFinished(0, FinishReason.LENGTH),
    ]


async def test_a_caller_that_waits_is_woken_by_tokens_and_by_the_end(tokenizer: Tokenizer) -> None:
    answer = Answer(1, tokenizer, ())

    async def all_text() -> list[str]:
        return [event.text async for event in answer.events() if isinstance(event, Delta)]

    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(all_text())
        for token in tokens("ab"):
            await asyncio.sleep(0)
            answer.push(answer.choices[0], (token,), None)
            await asyncio.sleep(0)
        answer.close()
    assert waiting.result() == ["a", "b"]
