"""Loading weights: nothing missing, nothing unused, nothing random, and every refusal names what is wrong."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.support.backends import CPU
from tests.support.forward import all_logits
from tests.support.tiny import Array, Tiny, write_tiny
from tests.support.tiny_gguf import write_tiny_gguf
from twostroke.engine.weights import WeightMode, load_model
from twostroke.errors import ModelError

TOKENS = list(b"a tiny prompt")


def change(folder: Path, edit: Callable[[dict[str, Array]], object]) -> Path:
    """Rewrite the folder's tensors."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def logits(path: Path) -> torch.Tensor:
    return all_logits(load_model(path, mode=WeightMode.F32, backend=CPU), TOKENS)


# Tied heads


@pytest.mark.parametrize("flag", [True, False])
def test_a_missing_head_is_the_embedding_matrix_whatever_the_flag_says(
    tmp_path: Path, flag: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny(tmp_path / "model", tied=True)
    expected = logits(folder)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": flag}
    (folder / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING):
        found = logits(folder)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert ("lm_head.weight" in caplog.text) == (not flag)


@pytest.mark.parametrize("flag", [True, False])
def test_a_head_in_the_file_is_used_whatever_the_flag_says(tmp_path: Path, flag: bool) -> None:
    folder = write_tiny(tmp_path / "model", tied=False)
    expected = logits(folder)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": flag}
    (folder / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(logits(folder), expected, atol=0, rtol=0)
    assert not load_model(folder, mode=WeightMode.F32, backend=CPU).config.tied_embeddings


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_has_a_head_of_its_own_or_ties_it(tmp_path: Path, tied: bool) -> None:
    path, folder = write_tiny_gguf(tmp_path / "m.gguf", tied=tied), write_tiny(tmp_path / "m", tied=tied)
    torch.testing.assert_close(logits(path), logits(folder), atol=1e-5, rtol=0)
    assert load_model(path, mode=WeightMode.F16, backend=CPU).config.tied_embeddings == tied


# Completeness


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"]
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    folder = change(write_tiny(tmp_path), lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=f"tensor {name} is missing"):
        load_model(folder, mode=WeightMode.F16, backend=CPU)


def test_more_layers_than_the_files_hold_are_noticed_at_once(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    for layers, message in ((900, r"layers\.899\.input_layernorm\.weight is missing"), (10**12, "at most 1000")):
        config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": layers}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=message):
            load_model(folder, mode=WeightMode.F16, backend=CPU)


def test_an_unused_tensor_is_named(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    folder = change(write_tiny(tmp_path), lambda tensors: tensors.update({name: np.zeros(64, np.float32)}))
    with pytest.raises(ModelError, match=f"no part of the model uses: {name}"):
        load_model(folder, mode=WeightMode.F16, backend=CPU)


def test_the_rotary_buffers_of_old_exports_are_harmless(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = change(write_tiny(tmp_path), lambda tensors: tensors.update({name: np.zeros(8, np.float32)}))
    assert logits(folder).isfinite().all()


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    folder = change(write_tiny(tmp_path), lambda tensors: tensors.update({name: np.zeros((64, 64), np.float32)}))
    with pytest.raises(ModelError, match=rf"{name} has shape \[64, 64\]; the configuration needs \[64, 128\]"):
        load_model(folder, mode=WeightMode.F16, backend=CPU)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    def poison(tensors: dict[str, Array]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value

    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN or infinite"):
        load_model(change(write_tiny(tmp_path), poison), mode=WeightMode.F32, backend=CPU)


def test_values_beyond_float16_are_refused_in_that_mode_only(tmp_path: Path) -> None:
    def enlarge(tensors: dict[str, Array]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = 7e4

    folder = change(write_tiny(tmp_path), enlarge)
    load_model(folder, mode=WeightMode.F32, backend=CPU)
    with pytest.raises(ModelError, match=r"values beyond f16"):
        load_model(folder, mode=WeightMode.F16, backend=CPU)


def test_a_path_that_holds_no_model_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model at"):
        load_model(tmp_path / "absent", mode=WeightMode.F16, backend=CPU)
    with pytest.raises(ModelError, match=r"cannot read config\.json"):
        load_model(tmp_path, mode=WeightMode.F16, backend=CPU)


# Values


def test_the_digest_follows_values_and_arithmetic_and_nothing_else(tmp_path: Path) -> None:
    def digest(path: Path, mode: WeightMode = WeightMode.F32) -> bytes:
        return load_model(path, mode=mode, backend=CPU).weights_digest

    first = digest(write_tiny(tmp_path / "first"))
    assert len(first) == 16
    assert digest(write_tiny(tmp_path / "copy"), WeightMode.F16) == first
    assert digest(write_tiny(tmp_path / "other", seed=1)) != first
    assert digest(write_tiny(tmp_path / "rope", theta=20_000.0)) != first


def test_the_kv_format_names_the_model_and_its_mode(tmp_path: Path) -> None:
    loaded, tiny = load_model(write_tiny(tmp_path / "model"), mode=WeightMode.F16, backend=CPU), Tiny()
    form = loaded.kv_format(block_tokens=8)
    assert form.block_shape == (tiny.layers, 2, 8, tiny.kv_heads, tiny.head_dim)
    assert (form.weight_mode, form.weights_digest) == ("f16", loaded.weights_digest)
    assert form.rope_digest == loaded.config.rope.digest
