from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_tokenizer import CHATML, CONTROL_TOKENS, IM_END, tiny_document, write_tiny_tokenizer
from twostroke.errors import ModelError, UnsupportedModel
from twostroke.text.bundle import SEAL, TokenizerBundle
from twostroke.text.detokenizer import Detokenizer
from twostroke.text.folder import bundle_from_folder
from twostroke.text.tokenizer import Tokenizer

FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


def write(folder: Path, document: dict[str, Any], config: dict[str, Any] | None = None) -> TokenizerBundle:
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return bundle_from_folder(folder)


def sentencepiece_document(**model: Any) -> dict[str, Any]:
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "a",
        "b",
        "\u2581a",
        "<",
        "s",
        ">",
    ]
    return {
        "version": "1.0",
        "added_tokens": [{"id": id_, "content": pieces[id_], **FLAGS, "special": True} for id_ in range(3)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {piece: id_ for id_, piece in enumerate(pieces)},
            "merges": [["\u2581", "a"]],
        }
        | model,
    }


def test_a_bundle_survives_the_wire(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    bundle = bundle_from_folder(tmp_path)
    again = TokenizerBundle.from_bytes(bundle.to_bytes())
    assert again == bundle
    assert again.digest == bundle.digest
    assert len(bundle.digest) == 16
    assert replace(bundle, chat_template=None).digest != bundle.digest


@pytest.mark.parametrize(
    "change",
    [
        {"added_tokens": [{"id": 1}]},
        {"added_tokens": {"a": 1}},
        {"decoder": "ByteLevel"},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a"]]}},
        {"model": {"type": "BPE", "vocab": {"a": 0}}},
        {"model": {"type": "Unigram", "vocab": ["a"]}},
    ],
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        write(tmp_path, tiny_document() | change)


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b"\xff", b'{"tokenizer_json": 1}', b"null"])
def test_bytes_that_are_no_bundle_are_refused(raw: bytes) -> None:
    with pytest.raises(ModelError):
        TokenizerBundle.from_bytes(raw)


def test_a_folder_gives_its_conventions(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, bos=CONTROL_TOKENS[0])
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 256}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 260]}))
    bundle = bundle_from_folder(tmp_path)
    assert (bundle.bos_token, bundle.eos_token, bundle.chat_template) == ("<|endoftext|>", "<|im_end|>", CHATML)
    assert bundle.end_token_ids == {256, IM_END, 260}  # the union of all that name one
    assert [special.text for special in bundle.specials] == list(CONTROL_TOKENS)


def test_of_several_templates_the_default_one_is_taken(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write_tiny_tokenizer(tmp_path, chat_template=templates)
    assert bundle_from_folder(tmp_path).chat_template == "d"
    write_tiny_tokenizer(tmp_path, chat_template=templates[:1])
    with pytest.raises(ModelError, match="tool_use"):
        bundle_from_folder(tmp_path)


def test_a_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert bundle_from_folder(tmp_path).chat_template == "from the file"


def test_a_folder_without_tokenizer_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json"):
        bundle_from_folder(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        bundle_from_folder(tmp_path)


def test_a_file_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no vocabulary"):
        write(tmp_path, {"version": "1.0"})


def test_an_unsupported_decoder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        write(tmp_path, tiny_document() | {"decoder": {"type": "WordPiece"}})


def test_an_added_token_that_would_load_under_another_id_is_refused(tmp_path: Path) -> None:
    document = tiny_document()
    document["added_tokens"].append({"id": 999, "content": "far", **FLAGS, "special": False})
    with pytest.raises(ModelError, match="999"):
        write(tmp_path, document)


def test_truncation_in_the_file_does_not_cut_prompts(tmp_path: Path) -> None:
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    tokenizer = Tokenizer(write(tmp_path, tiny_document() | {"truncation": truncation}))
    assert len(tokenizer.encode("a long text", allow_special=False)) == 11


def test_a_control_token_named_only_by_the_configuration_is_one(tmp_path: Path) -> None:
    document = tiny_document()
    document["added_tokens"][2]["special"] = False
    tokenizer = Tokenizer(write(tmp_path, document, {"eos_token": {"content": "<|im_end|>"}}))
    assert tokenizer.encode("<|im_end|>", allow_special=False) == list(b"<|im_end|>")
    assert tokenizer.encode("<|im_end|>", allow_special=True) == [IM_END]


def test_added_words_that_are_no_control_tokens_are_units_in_any_text(tmp_path: Path) -> None:
    document = tiny_document()
    document["added_tokens"].append({"id": 272, "content": "<tool_call>é", **FLAGS, "special": False})
    tokenizer = Tokenizer(write(tmp_path, document))
    for allow_special in (False, True):
        assert tokenizer.encode("a<tool_call>é", allow_special=allow_special) == [97, 272]
    assert tokenizer.token_bytes(272) == "<tool_call>é".encode()


def test_a_vocabulary_entry_with_a_control_tokens_name_is_out_of_reach_of_text(tmp_path: Path) -> None:
    merges = [["<", "s"], ["<s", ">"]]
    document = sentencepiece_document(merges=merges, ignore_merges=True)
    document["model"]["vocab"]["<s"] = len(document["model"]["vocab"])
    tokenizer = Tokenizer(write(tmp_path, document))
    assert 1 not in tokenizer.encode("<s>", allow_special=False)
    assert tokenizer.encode("<s>", allow_special=True) == [1]


def test_a_unigram_entry_with_a_control_tokens_name_is_out_of_reach_of_text(tmp_path: Path) -> None:
    document = sentencepiece_document()
    pieces = document["model"]["vocab"]
    vocab = [[piece, 0.0 if piece == "<s>" else -10.0] for piece in pieces]
    document["model"] = {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": True}
    tokenizer = Tokenizer(write(tmp_path, document))
    assert 1 not in tokenizer.encode("<s>", allow_special=False)


def test_bos_follows_the_files_own_processing_when_the_configuration_is_silent(tmp_path: Path) -> None:
    assert write(tmp_path, sentencepiece_document(), {"bos_token": "<s>"}).add_bos
    assert not write(tmp_path, sentencepiece_document(), {"bos_token": "<s>", "add_bos_token": False}).add_bos


def test_sentencepiece_tokens_stand_for_their_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, sentencepiece_document()))
    ids = tokenizer.encode("a é", allow_special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == " a é".encode()  # with SentencePiece's dummy prefix
    assert tokenizer.decode(ids) == "a é"
    assert [tokenizer.token_bytes(id_) for id_ in ids][-2:] == [b"\xc3", b"\xa9"]


def test_the_dummy_prefix_is_dropped_only_where_a_text_starts(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, sentencepiece_document()))
    ids = tokenizer.encode("a a", allow_special=False)
    alone, after_prompt = (Detokenizer(tokenizer, after_text=after) for after in (False, True))
    assert "".join(alone.push([id_]) for id_ in ids) == "a a"
    assert "".join(after_prompt.push([id_]) for id_ in ids) == " a a"


def test_a_vocabulary_with_reserved_names_is_refused(tmp_path: Path) -> None:
    document = tiny_document(())
    document["model"]["vocab"] |= {f"{SEAL}{at}": 256 + at for at in range(4)}
    with pytest.raises(ModelError, match="reserved"):
        write(tmp_path, document)
