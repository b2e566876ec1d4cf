from __future__ import annotations

import pytest

from tests.support.tiny_tokenizer import write_tiny_tokenizer
from twostroke.errors import InvalidRequest
from twostroke.text.folder import bundle_from_folder
from twostroke.text.stops import StopMatcher, TextDelta, TextStream
from twostroke.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_tokenizer(folder)
    return Tokenizer(bundle_from_folder(folder))


def test_no_part_of_a_stop_string_is_shown() -> None:
    matcher = StopMatcher(["KLMNOP"])
    assert [matcher.push(piece) for piece in ("aKL", "M", "NO", "P", "more")] == ["a", "", "", "", ""]
    assert matcher.stopped
    assert matcher.finish() == ""


def test_what_was_held_back_comes_as_soon_as_it_cannot_match() -> None:
    matcher = StopMatcher(["KLMNOP"])
    assert [matcher.push(piece) for piece in ("KL", "M", "x")] == ["", "", "KLMx"]


def test_text_that_begins_no_stop_string_is_never_delayed() -> None:
    matcher = StopMatcher(["<END_OF_ANSWER_MARKER>"])
    pieces = ["plain ", "text, ", "piece ", "by piece"]
    assert [matcher.push(piece) for piece in pieces] == pieces


def test_the_end_of_the_answer_shows_what_was_held_back() -> None:
    matcher = StopMatcher(["\n\n"])
    assert (matcher.push("a\n"), matcher.finish()) == ("a", "\n")
    assert not matcher.stopped


def test_the_stop_string_that_is_complete_first_wins_and_of_two_the_longer() -> None:
    assert StopMatcher(["abcd", "bc"]).push("xabcd") == "xa"
    assert StopMatcher(["c", "abc"]).push("xabcd") == "x"


def test_a_stop_string_that_restarts_inside_itself_is_found() -> None:
    matcher = StopMatcher(["aab"])
    assert "".join(map(matcher.push, "xaaab")) == "xa"
    assert matcher.stopped


def test_the_stop_string_is_shown_when_asked_for() -> None:
    assert StopMatcher(["END"], include=True).push("theEND, really") == "theEND"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        StopMatcher(["a", ""])
    assert caught.value.field == "stop"


def test_without_stop_strings_text_passes_through() -> None:
    matcher = StopMatcher([])
    assert (matcher.push("a"), matcher.push(""), matcher.finish()) == ("a", "", "")


def test_tokens_after_the_stop_string_are_not_used(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["STOP"])
    assert stream.push(b"so ST") == TextDelta("so ", False, 5)
    assert stream.push(b"OP it") == TextDelta("", True, 2)
    assert stream.push(b"more") == TextDelta("", True, 0)
    assert stream.finish() == TextDelta("", True, 0)


def test_an_answer_cut_inside_a_character_ends_with_a_replacement(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["\n"])
    assert stream.push("ok 😀".encode()[:-1]) == TextDelta("ok ", False, 6)
    assert stream.finish() == TextDelta("\ufffd", False, 0)


def test_a_replacement_at_the_end_can_complete_a_stop_string(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["a\ufffd"])
    assert stream.push([*b"xa", 0xF0]) == TextDelta("x", False, 3)
    assert stream.finish() == TextDelta("", True, 0)


def test_a_stop_string_within_the_first_min_tokens_is_ordinary_text(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["END"], min_tokens=6)
    assert stream.push(b"ENDEND") == TextDelta("ENDEND", False, 6)
    assert stream.push(b"END.") == TextDelta("", True, 3)


def test_a_stop_string_that_only_begins_within_the_first_min_tokens_counts(tokenizer: Tokenizer) -> None:
    assert TextStream(tokenizer, ["END"], min_tokens=3).push(b"abEND.") == TextDelta("ab", True, 5)


def test_a_stop_string_that_was_too_early_is_not_found_later_in_what_was_held_back(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["abcd", "bc"], min_tokens=3)
    assert stream.push(b"abcx") == TextDelta("abcx", False, 4)
    assert stream.push(b"bc") == TextDelta("", True, 2)
