"""Loading safetensors: whole or sharded, complete before anything is read, and never a pickle."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.support.backends import CPU
from tests.support.forward import all_logits
from tests.support.tiny import write_tiny
from twostroke.engine.weights import WeightMode, load_model
from twostroke.errors import ModelError, UnsupportedModel

TOKENS = list(b"a tiny prompt")


def logits(path: Path) -> torch.Tensor:
    return all_logits(load_model(path, mode=WeightMode.F32, backend=CPU), TOKENS)


def shard(folder: Path, *, missing: str | None = None) -> Path:
    """Split a folder's tensors over two files with an index, and lose one of them."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{1 + at % 2:05d}-of-00002.safetensors" for at, name in enumerate(tensors)}
    for file in set(weight_map.values()) - {missing}:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_shards_load_as_one_file_does(tmp_path: Path) -> None:
    whole, sharded = write_tiny(tmp_path / "whole"), shard(write_tiny(tmp_path / "sharded"))
    torch.testing.assert_close(logits(sharded), logits(whole), atol=0, rtol=0)


def test_a_missing_shard_is_named_before_anything_is_read(tmp_path: Path) -> None:
    lost = "model-00002-of-00002.safetensors"
    folder = shard(write_tiny(tmp_path), missing=lost)
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"damaged as well")
    with pytest.raises(ModelError, match=f"files that are not there: {lost}"):
        load_model(folder, mode=WeightMode.F16, backend=CPU)


def test_an_index_that_disagrees_with_a_shard_is_refused(tmp_path: Path) -> None:
    folder = shard(write_tiny(tmp_path))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"disagree on model\.norm\.weight"):
        load_model(folder, mode=WeightMode.F16, backend=CPU)


def test_an_index_cannot_point_out_of_its_folder(tmp_path: Path) -> None:
    folder = shard(write_tiny(tmp_path))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": "../../etc/passwd"}}))
    with pytest.raises(ModelError, match="outside the folder"):
        load_model(folder, mode=WeightMode.F16, backend=CPU)


@pytest.mark.parametrize("size", [0, 100, -1])
def test_a_cut_file_is_a_typed_error(tmp_path: Path, size: int) -> None:
    folder = write_tiny(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"cannot read model\.safetensors"):
        load_model(folder, mode=WeightMode.F16, backend=CPU)


def test_an_integer_tensor_is_unsupported_by_name_and_dtype(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    tensors = {**load_file(folder / "model.safetensors"), "model.norm.weight": np.ones(64, np.int8)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"tensor model\.norm\.weight has dtype I8"):
        load_model(folder, mode=WeightMode.F16, backend=CPU)


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="only pickled weights"):
        load_model(folder, mode=WeightMode.F16, backend=CPU)
