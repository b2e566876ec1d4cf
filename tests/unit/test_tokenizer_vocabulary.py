from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFWriter

from tests.support.tiny_tokenizer import CONTROL_TOKENS, IM_END, IM_START, VOCAB_SIZE, write_tiny_tokenizer
from twostroke.errors import ModelError, UnsupportedModel
from twostroke.gguf import GgufMetadata, GgufValue
from twostroke.text.folder import bundle_from_folder
from twostroke.text.loading import load_bundle
from twostroke.text.segment import Segment
from twostroke.text.tokenizer import Tokenizer, byte_level_alphabet
from twostroke.text.vocabulary import bundle_from_metadata

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
BYTES = tuple(char for char, _ in sorted(byte_level_alphabet().items(), key=lambda entry: entry[1]))


def metadata(**changes: GgufValue | None) -> GgufMetadata:
    """The tiny tokenizer as GGUF keys; `changes` name them without their prefix, None takes one away."""
    values: dict[str, GgufValue | None] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": (*BYTES, *CONTROL_TOKENS),
        "token_type": (NORMAL,) * 256 + (CONTROL,) * len(CONTROL_TOKENS),
        "merges": (),
        "bos_token_id": IM_START,
        "eos_token_id": IM_END,
        **changes,
    }
    return GgufMetadata({f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None})


def test_a_gguf_vocabulary_encodes_as_the_folder_does(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    ours, folder = Tokenizer(bundle_from_metadata(metadata())), Tokenizer(bundle_from_folder(tmp_path))
    text = "It's 12 <|im_end|> é😀\n"
    for allow_special in (False, True):
        assert ours.encode(text, allow_special=allow_special) == folder.encode(text, allow_special=allow_special)


@pytest.mark.parametrize(("add_bos", "expected"), [(True, [IM_START, 97]), (False, [97]), (None, [97])])
def test_bos_is_added_when_the_file_says_so(add_bos: bool | None, expected: list[int]) -> None:
    tokenizer = Tokenizer(bundle_from_metadata(metadata(add_bos_token=add_bos)))
    assert tokenizer.encode_prompt([Segment("a", True)]) == expected
    assert tokenizer.encode_prompt([Segment("<|im_start|>a", True)]) == [IM_START, 97]


def test_a_leading_space_is_added_when_the_file_says_so() -> None:
    tokenizer = Tokenizer(bundle_from_metadata(metadata(add_space_prefix=True)))
    assert tokenizer.encode("a", allow_special=False) == list(b" a")


def test_user_defined_tokens_are_units_with_text() -> None:
    word = "<think> é"
    types = (NORMAL,) * 256 + (CONTROL,) * len(CONTROL_TOKENS) + (USER_DEFINED,)
    tokenizer = Tokenizer(bundle_from_metadata(metadata(tokens=(*BYTES, *CONTROL_TOKENS, word), token_type=types)))
    assert tokenizer.encode(f"a{word}b", allow_special=False) == [97, VOCAB_SIZE, 98]
    assert tokenizer.token_bytes(VOCAB_SIZE) == word.encode()


def test_every_end_token_the_file_names_ends_an_answer() -> None:
    assert bundle_from_metadata(metadata(eot_token_id=260, eom_token_id=261)).end_token_ids == {IM_END, 260, 261}


@pytest.mark.parametrize("changes", [{"model": "t5"}, {"model": None}, {"pre": "viking"}])
def test_a_vocabulary_of_an_unknown_kind_is_named(changes: dict[str, GgufValue | None]) -> None:
    with pytest.raises(UnsupportedModel, match=repr(next(iter(changes.values())))):
        bundle_from_metadata(metadata(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": None},
        {"merges": None},
        {"token_type": (1, 2)},
        {"tokens": ("a", "a"), "token_type": (1, 1)},
        {"merges": ("a missing",)},
        {"merges": ("one_part_only",)},
    ],
)
def test_a_damaged_vocabulary_is_refused(changes: dict[str, GgufValue | None]) -> None:
    with pytest.raises(ModelError):
        bundle_from_metadata(metadata(**changes))


def test_a_model_is_read_from_a_folder_or_a_file(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    assert load_bundle(tmp_path).chat_template
    writer = GGUFWriter(str(tmp_path / "tiny.gguf"), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*BYTES, *CONTROL_TOKENS, "hi"])
    writer.add_token_types([NORMAL] * 256 + [CONTROL] * len(CONTROL_TOKENS) + [NORMAL])
    writer.add_token_merges(["h i"])
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert Tokenizer(load_bundle(tmp_path / "tiny.gguf")).encode("hi", allow_special=False) == [VOCAB_SIZE]
    with pytest.raises(ModelError):
        load_bundle(tmp_path / "nothing.gguf")
