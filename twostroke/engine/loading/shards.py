"""The safetensors of a Hugging Face folder, in one file or sharded, as a TensorSource."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from twostroke.engine.loading.fields import Fields
from twostroke.errors import ModelError, UnsupportedModel

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")
_HARMLESS = ".rotary_emb.inv_freq"  # a buffer that old exports wrote out; it follows from the configuration


class SafetensorsSource:
    """All shards of a folder, checked to be complete before anything is read.

    Raises:
        ModelError: a shard is missing or damaged, or the index and the shards disagree.
        UnsupportedModel: a tensor's dtype is none of F32, F16, BF16, or the folder has only pickles.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path, listed in _shards(folder).items():
            self._scan(path, listed)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor by name."""
        return self._shapes

    @property
    def files(self) -> tuple[Path, ...]:
        """All shards that hold tensors, in the order of their names."""
        return tuple(sorted(set(self._files.values())))

    def read(self, name: str) -> Tensor:
        """Return one tensor, copied out of its file, as float32."""
        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor.to(torch.float32, copy=True)

    def _scan(self, path: Path, listed: frozenset[str] | None) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
                facts = {name: (tuple(each.get_shape()), each.get_dtype()) for name, each in slices.items()}
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read {path.name}: {error}") from error
        if listed is not None and listed != facts.keys():
            differing = ", ".join(sorted(listed ^ facts.keys()))
            raise ModelError(f"{_INDEX} and {path.name} disagree on {differing}")
        for name, (shape, dtype) in facts.items():
            if name.endswith(_HARMLESS):
                continue
            if dtype not in _DTYPES:
                raise UnsupportedModel(f"tensor {name} has dtype {dtype}; {', '.join(_DTYPES)} are supported")
            self._files[name], self._shapes[name] = path, shape


def _shards(folder: Path) -> dict[Path, frozenset[str] | None]:
    """Return each shard and the tensors the index promises in it; None where there is no index."""
    if (folder / _WHOLE).exists():
        return {folder / _WHOLE: None}
    if not (folder / _INDEX).exists():
        if any(folder.glob("*.bin")):
            raise UnsupportedModel(f"{folder.name} holds only pickled weights, which are not read; convert them")
        raise ModelError(f"{folder.name} holds neither {_WHOLE} nor {_INDEX}")
    promised: dict[str, set[str]] = {}
    for name, shard in Fields.read(folder / _INDEX).inner("weight_map").items().items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelError(f"{_INDEX} places {name} outside the folder")
        promised.setdefault(shard, set()).add(name)
    missing = sorted(shard for shard in promised if not (folder / shard).is_file())
    if missing:
        raise ModelError(f"{_INDEX} names files that are not there: {', '.join(missing)}")
    return {folder / shard: frozenset(names) for shard, names in promised.items()}
