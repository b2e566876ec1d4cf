from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.texts import corpus
from tests.support.tiny_tokenizer import CONTROL_TOKENS, IM_END, IM_START, VOCAB_SIZE, write_tiny_tokenizer
from twostroke.errors import InvalidRequest, TooLarge
from twostroke.limits import MAX_PROMPT_CHARACTERS
from twostroke.text.folder import bundle_from_folder
from twostroke.text.segment import Segment
from twostroke.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_tokenizer(folder)
    return Tokenizer(bundle_from_folder(folder))


def test_a_byte_is_its_token(tokenizer: Tokenizer) -> None:
    text = "né 😀\n"
    assert tokenizer.encode(text, allow_special=False) == list(text.encode())
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert [tokenizer.token_bytes(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]


@pytest.mark.parametrize("name", CONTROL_TOKENS)
def test_a_control_tokens_name_is_that_token_only_where_it_is_allowed(tokenizer: Tokenizer, name: str) -> None:
    id_ = tokenizer.id_of(name)
    assert id_ is not None
    assert tokenizer.encode(f"a{name}b", allow_special=True) == [97, id_, 98]
    assert tokenizer.encode(f"a{name}b", allow_special=False) == list(f"a{name}b".encode())
    assert tokenizer.token_bytes(id_) == b""


def test_segments_are_encoded_as_one_text(tokenizer: Tokenizer) -> None:
    segments = [Segment("<|im_start|>us", True), Segment("er\n<|im_end|>", False), Segment("<|im_end|>", True)]
    assert tokenizer.encode_segments(segments) == [IM_START, *b"user\n<|im_end|>", IM_END]


def test_a_control_tokens_name_that_spans_segments_stays_text(tokenizer: Tokenizer) -> None:
    segments = [Segment("<|im_", True), Segment("end|>", False)]
    assert tokenizer.encode_segments(segments) == list(b"<|im_end|>")


def test_text_of_reserved_characters_is_plain_text(tokenizer: Tokenizer) -> None:
    text = "\ufdd0sealed:257\ufdd1"
    assert tokenizer.encode(text, allow_special=True) == list(text.encode())


def test_every_text_comes_back(tokenizer: Tokenizer) -> None:
    for text in corpus(400):
        assert tokenizer.decode(tokenizer.encode(text, allow_special=False)) == text


def test_decoding_leaves_control_tokens_out_and_marks_broken_characters(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([IM_START, 97, IM_END, 0xF0, 0x9F]) == "a�"


def test_ids_that_stand_for_nothing_have_no_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(VOCAB_SIZE) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert tokenizer.id_of("no such token") is None


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.encode("a\ud83d", allow_special=False)
    assert caught.value.field == "prompt"


def test_a_text_beyond_the_limit_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(TooLarge):
        tokenizer.encode("a" * (2 * MAX_PROMPT_CHARACTERS + 1), allow_special=False)


@pytest.mark.parametrize(("add_bos", "expected"), [(True, [256, 97]), (False, [97]), (None, [97])])
def test_bos_follows_the_metadata(tmp_path: Path, add_bos: bool | None, expected: list[int]) -> None:
    write_tiny_tokenizer(tmp_path, bos=CONTROL_TOKENS[0], add_bos=add_bos)
    tokenizer = Tokenizer(bundle_from_folder(tmp_path))
    assert tokenizer.encode_prompt([Segment("a", True)]) == expected


def test_there_are_never_two_bos(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, bos=CONTROL_TOKENS[0], add_bos=True)
    tokenizer = Tokenizer(bundle_from_folder(tmp_path))
    assert tokenizer.encode_prompt([Segment("<|endoftext|>a", True)]) == [256, 97]
    assert tokenizer.encode_prompt([Segment("<|endoftext|>a", False)]) == [256, *b"<|endoftext|>a"]


def test_an_empty_prompt_is_a_single_bos_or_nothing(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_prompt([]) == []
    write_tiny_tokenizer(tmp_path, bos=CONTROL_TOKENS[0], add_bos=True)
    assert Tokenizer(bundle_from_folder(tmp_path)).encode_prompt([]) == [256]
