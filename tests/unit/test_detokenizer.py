from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_tokenizer import IM_END, IM_START, write_tiny_tokenizer
from twostroke.text.detokenizer import Detokenizer
from twostroke.text.folder import bundle_from_folder
from twostroke.text.tokenizer import Tokenizer


@pytest.fixture
def detokenizer(tmp_path: Path) -> Detokenizer:
    write_tiny_tokenizer(tmp_path)
    return Detokenizer(Tokenizer(bundle_from_folder(tmp_path)), after_text=True)


def test_a_character_comes_with_its_last_byte(detokenizer: Detokenizer) -> None:
    assert [detokenizer.push([byte]) for byte in "😀中é".encode()] == ["", "", "", "😀", "", "", "中", "", "é"]
    assert detokenizer.finish() == ""


def test_a_character_split_over_pushes_comes_whole(detokenizer: Detokenizer) -> None:
    raw = "a😀b".encode()
    assert [detokenizer.push(raw[:3]), detokenizer.push(raw[3:])] == ["a", "😀b"]


def test_half_a_character_at_the_end_is_one_replacement(detokenizer: Detokenizer) -> None:
    assert detokenizer.push("😀".encode()[:3]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_bytes_that_can_never_be_a_character_do_not_wait(detokenizer: Detokenizer) -> None:
    assert detokenizer.push([0xFF]) == "\ufffd"
    assert detokenizer.push([0xF0, 0x41]) == "\ufffdA"


def test_control_tokens_have_no_text_even_inside_a_character(detokenizer: Detokenizer) -> None:
    assert detokenizer.push([IM_START, 0xC3, IM_END, 0xA9, IM_END]) == "é"
