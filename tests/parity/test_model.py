"""Logits of tiny models against transformers, from safetensors and from GGUF."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from tests.support.backends import CPU
from tests.support.forward import all_logits
from tests.support.oracle import Oracle
from tests.support.tiny import write_tiny
from tests.support.tiny_gguf import write_tiny_gguf
from twostroke.engine.weights import WeightMode, load_model

TOKENS = [(7 * n * n + 3 * n) % 256 for n in range(150)]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODES = (WeightMode.F32, WeightMode.F16)
GEMMA: dict[str, Any] = {"family": "gemma3", "layers": 7, "theta": 1_000_000.0, "window": 24}  # five local, one not
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 4},
    "llama with grouped queries": {},
    "llama with one key-value head": {"kv_heads": 1, "tied": False},
    "llama with biases": {"attention_bias": True},
    "mistral": {"family": "mistral", "tied": False},
    "mistral with a window": {"family": "mistral", "window": 20},
    "qwen2 with biases": {"family": "qwen2"},
    "qwen2 untied": {"family": "qwen2", "tied": False, "seed": 3},
    "qwen3": {"family": "qwen3"},
    "qwen3 untied": {"family": "qwen3", "tied": False, "theta": 1_000_000.0, "seed": 4},
    "gemma3": GEMMA,
    "gemma3 with one key-value head and other scores": GEMMA | {"kv_heads": 1, "query_scalar": 168},
    "gemma3 with a stretched global rope": GEMMA | {"rope": {"rope_type": "linear", "factor": 8.0}},
    "llama3 rope": {"rope": LLAMA3},
    "linear rope": {"rope": {"rope_type": "linear", "factor": 4.0}},
    "linear rope by its legacy key": {"rope": {"type": "linear", "factor": 4.0}},
}
GGUF_SHAPES = {
    name: what
    for name, what in SHAPES.items()
    if what.get("family") != "mistral" and "legacy" not in name and "query_scalar" not in what
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", SHAPES.values(), ids=SHAPES)
def test_logits_from_safetensors_equal_transformers(tmp_path: Path, what: dict[str, Any], mode: WeightMode) -> None:
    folder = write_tiny(tmp_path / "model", **what)
    expected = Oracle.folder(folder).round(mode).logits(TOKENS)
    found = all_logits(load_model(folder, mode=mode, backend=CPU), TOKENS)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", GGUF_SHAPES.values(), ids=GGUF_SHAPES)
def test_logits_from_gguf_equal_transformers_on_the_folder(
    tmp_path: Path, what: dict[str, Any], mode: WeightMode
) -> None:
    folder = write_tiny(tmp_path / "model", **what)
    path = write_tiny_gguf(tmp_path / "model.gguf", **what)
    expected = Oracle.folder(folder).round(mode).logits(TOKENS)
    found = all_logits(load_model(path, mode=mode, backend=CPU), TOKENS)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_a_quantized_gguf_equals_a_folder_of_its_dequantized_values(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf", quantization=gguf.GGMLQuantizationType.Q8_0)
    exact = all_logits(load_model(write_tiny(tmp_path / "model"), mode=WeightMode.F32, backend=CPU), TOKENS)
    quantized = all_logits(load_model(path, mode=WeightMode.F32, backend=CPU), TOKENS)
    expected = Oracle.gguf(path).logits(TOKENS)
    torch.testing.assert_close(quantized, expected, atol=1e-3, rtol=0)
    assert (quantized - exact).abs().max() > 1e-2


@pytest.mark.parametrize("chunks", [[1], [16], [15, 17, 1, 1, 60], [149], [1] * 149])
def test_a_prompt_in_chunks_scores_as_a_whole(tmp_path: Path, chunks: list[int]) -> None:
    loaded = load_model(write_tiny(tmp_path / "model"), mode=WeightMode.F16, backend=CPU)
    whole, pieces = all_logits(loaded, TOKENS), all_logits(loaded, TOKENS, chunks=chunks)
    torch.testing.assert_close(pieces, whole, atol=1e-4, rtol=0)


def test_rope_scaling_matters_so_that_the_tests_above_would_notice(tmp_path: Path) -> None:
    scaled = load_model(write_tiny(tmp_path / "scaled", rope=LLAMA3), mode=WeightMode.F32, backend=CPU)
    plain = load_model(write_tiny(tmp_path / "plain"), mode=WeightMode.F32, backend=CPU)
    assert (all_logits(scaled, TOKENS) - all_logits(plain, TOKENS)).abs().max() > 0.1
