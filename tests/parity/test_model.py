"""Logits of tiny models of every family against transformers, in every weight mode, from safetensors and from GGUF."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from tests.support.backends import BACKENDS, CPU, chunks_bound
from tests.support.forward import all_logits
from tests.support.oracle import Oracle
from tests.support.tiny import write_tiny
from tests.support.tiny_gguf import write_tiny_gguf
from twostroke.engine.weights import WeightMode, load_model

TOKENS = [(7 * n * n + 3 * n) % 256 for n in range(150)]  # six times the windows below
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA: dict[str, Any] = {"family": "gemma3", "layers": 7, "theta": 1_000_000.0, "window": 24}  # the sixth sees all
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 4},
    "llama with grouped queries": {},
    "llama with one key-value head": {"kv_heads": 1, "tied": False},
    "llama with biases": {"attention_bias": True},
    "llama untied with biases": {"attention_bias": True, "tied": False},
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
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"family": "mistral", "window": 20},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "gemma3": GEMMA,
}
each_mode = pytest.mark.parametrize("mode", WeightMode)
each_family = pytest.mark.parametrize("what", FAMILIES.values(), ids=FAMILIES)


@each_mode
@pytest.mark.parametrize("what", SHAPES.values(), ids=SHAPES)
def test_logits_from_safetensors_equal_transformers(tmp_path: Path, what: dict[str, Any], mode: WeightMode) -> None:
    folder = write_tiny(tmp_path / "model", **what)
    expected = Oracle.folder(folder).round(mode).logits(TOKENS)
    found = all_logits(load_model(folder, mode=mode, backend=CPU), TOKENS)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


@each_mode
@pytest.mark.parametrize("what", GGUF_SHAPES.values(), ids=GGUF_SHAPES)
def test_logits_from_gguf_equal_transformers_on_the_folder(
    tmp_path: Path, what: dict[str, Any], mode: WeightMode
) -> None:
    folder = write_tiny(tmp_path / "model", **what)
    path = write_tiny_gguf(tmp_path / "model.gguf", **what)
    expected = Oracle.folder(folder).round(mode).logits(TOKENS)
    found = all_logits(load_model(path, mode=mode, backend=CPU), TOKENS)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


@each_family
def test_a_folder_that_transformers_wrote_is_read_as_it_was_meant(tmp_path: Path, what: dict[str, Any]) -> None:
    oracle = Oracle.folder(write_tiny(tmp_path / "model", **what))
    written = oracle.save(tmp_path / "written")  # its config.json is in the words of the transformers at hand
    found = all_logits(load_model(written, mode=WeightMode.F32, backend=CPU), TOKENS)
    torch.testing.assert_close(found, oracle.logits(TOKENS), atol=1e-3, rtol=0)


def test_a_quantized_gguf_equals_a_folder_of_its_dequantized_values(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf", quantization=gguf.GGMLQuantizationType.Q8_0)
    exact = all_logits(load_model(write_tiny(tmp_path / "model"), mode=WeightMode.F32, backend=CPU), TOKENS)
    quantized = all_logits(load_model(path, mode=WeightMode.F32, backend=CPU), TOKENS)
    expected = Oracle.gguf(path).logits(TOKENS)
    torch.testing.assert_close(quantized, expected, atol=1e-3, rtol=0)
    assert (quantized - exact).abs().max() > 1e-2


@pytest.mark.parametrize("backend", ["torch", "native"])
@each_mode
@each_family
def test_a_prompt_in_chunks_scores_as_a_whole(
    tmp_path: Path, what: dict[str, Any], mode: WeightMode, backend: str
) -> None:
    loaded = load_model(write_tiny(tmp_path / "model", **what), mode=mode, backend=BACKENDS[backend]())
    whole, pieces = all_logits(loaded, TOKENS), all_logits(loaded, TOKENS, chunks=[15, 1, 1, 60])
    torch.testing.assert_close(pieces, whole, atol=chunks_bound(loaded.model.backend), rtol=0)


@pytest.mark.parametrize("chunks", [[1], [16], [15, 17, 1, 1, 60], [149], [1] * 149])
@pytest.mark.parametrize("what", [{}, GEMMA], ids=["llama", "gemma3"])
def test_any_chunks_score_as_a_whole(tmp_path: Path, what: dict[str, Any], chunks: list[int]) -> None:
    loaded = load_model(write_tiny(tmp_path / "model", **what), mode=WeightMode.F16, backend=CPU)
    whole, pieces = all_logits(loaded, TOKENS), all_logits(loaded, TOKENS, chunks=chunks)
    torch.testing.assert_close(pieces, whole, atol=chunks_bound(loaded.model.backend), rtol=0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"rope": LLAMA3}, {}),
        (GEMMA, GEMMA | {"window": 25}),
        (GEMMA, GEMMA | {"theta": 10_000.0}),
        (GEMMA, GEMMA | {"query_scalar": 168}),
    ],
    ids=["rope scaling", "one token more in a window", "the global rope", "the scores' scale"],
)
def test_a_setting_matters_so_that_the_tests_above_would_notice(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any]
) -> None:
    folders = (write_tiny(tmp_path / name, **what) for name, what in (("one", one), ("other", other)))
    first, second = (all_logits(load_model(each, mode=WeightMode.F32, backend=CPU), TOKENS) for each in folders)
    assert (first - second).abs().max() > 0.1


def test_modes_differ_by_more_than_the_bound_so_that_the_tests_above_would_notice(tmp_path: Path) -> None:
    oracle = Oracle.folder(write_tiny(tmp_path / "model"))
    scores = {mode: oracle.round(mode).logits(TOKENS) for mode in WeightMode}
    for mode in (WeightMode.BF16, WeightMode.INT8):
        assert all((scores[mode] - scores[other]).abs().max() > 1e-2 for other in WeightMode if other is not mode)
