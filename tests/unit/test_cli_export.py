"""An exported tokenizer is the model's own, to transformers too."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.support.tiny_tokenizer import CONTROL_TOKENS, write_tiny_tokenizer
from twostroke.cli.export import export_tokenizer
from twostroke.launcher.refusal import Refusal
from twostroke.text.folder import bundle_from_folder
from twostroke.text.segment import Segment
from twostroke.text.tokenizer import Tokenizer

TEXTS = (
    "",
    "What is the capital of France?",
    " tabs\tand\nlines ",
    "naïve 日本語 🙂",
    "<|im_start|>user",
    "a<|im_end|>b",
)


@pytest.mark.parametrize("bos", [None, CONTROL_TOKENS[0]])
def test_it_gives_the_same_ids_in_transformers(tmp_path: Path, bos: str | None) -> None:
    (tmp_path / "model").mkdir()
    write_tiny_tokenizer(tmp_path / "model", bos=bos, add_bos=bos is not None)
    bundle = bundle_from_folder(tmp_path / "model")
    export_tokenizer(bundle, tmp_path / "out")
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "out"), Tokenizer(bundle)
    for text in TEXTS:
        assert theirs.encode(text) == ours.encode_prompt([Segment(text, True)])
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text, allow_special=True)


def test_it_keeps_the_chat_template_and_the_end_of_an_answer(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_tiny_tokenizer(tmp_path / "model")
    export_tokenizer(bundle_from_folder(tmp_path / "model"), tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    original = AutoTokenizer.from_pretrained(tmp_path / "model")
    messages = [{"role": "user", "content": "hello"}]
    assert theirs.eos_token == "<|im_end|>"
    assert theirs.apply_chat_template(messages, tokenize=False) == original.apply_chat_template(
        messages, tokenize=False
    )


def test_exporting_twice_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_tiny_tokenizer(tmp_path / "model", bos=CONTROL_TOKENS[0], add_bos=True)
    bundle = bundle_from_folder(tmp_path / "model")
    export_tokenizer(bundle, tmp_path / "out")
    assert bundle_from_folder(tmp_path / "out").tokenizer_json == bundle.tokenizer_json


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "model").mkdir()
    write_tiny_tokenizer(tmp_path / "model")
    with pytest.raises(Refusal, match="cannot write"):
        export_tokenizer(bundle_from_folder(tmp_path / "model"), tmp_path / "file")
