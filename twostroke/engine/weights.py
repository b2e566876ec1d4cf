"""From a path to a model that can run: nothing missing, nothing unused, nothing random."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from twostroke.engine.backend import Backend
from twostroke.engine.cache import kv_dtype
from twostroke.engine.config import ModelConfig
from twostroke.engine.loading.checkpoint import Checkpoint, TensorSource
from twostroke.engine.loading.digests import FileState, states, weights_digest
from twostroke.engine.loading.draft import Draft, RecordedParts, needed_bytes
from twostroke.engine.loading.folder import folder_config
from twostroke.engine.loading.gguf_config import gguf_config
from twostroke.engine.loading.gguf_tensors import GgufSource
from twostroke.engine.loading.parts import CheckpointParts, Parts
from twostroke.engine.loading.prepared import Damaged, PreparedFile, PreparedParts, prepared_name
from twostroke.engine.loading.shards import SafetensorsSource
from twostroke.engine.loading.shelf import WeightsCache
from twostroke.engine.matrix import WeightMode
from twostroke.engine.mode import KvMode
from twostroke.engine.models import CausalModel
from twostroke.engine.models.registry import FAMILIES
from twostroke.errors import ModelError
from twostroke.kv.format import KvFormat

_CLAIMS = 3  # a damaged file is thrown away and made again, not for ever

__all__ = ["LoadedModel", "WeightMode", "load_model", "read_config", "read_shapes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory, and the identity of its values."""

    config: ModelConfig
    model: CausalModel
    mode: WeightMode
    weights_digest: bytes  # 16 bytes over the files and the arithmetic; the mode is told apart by KvFormat

    def kv_format(self, *, block_tokens: int = 16, kv: KvMode = KvMode.AUTO) -> KvFormat:
        """Name the bytes that this model's keys and values make.

        Raises:
            InvalidSetting: the device attends over no such numbers.
        """
        return KvFormat(
            model=self.config.name,
            weights_digest=self.weights_digest,
            weight_mode=self.mode.value,
            layers=self.config.num_layers,
            kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            block_tokens=block_tokens,
            dtype=kv_dtype(kv, self.mode, self.model.backend.dtype),
            rope_digest=self.config.rope_digest,
        )


def read_config(path: Path) -> ModelConfig:
    """Read what the model at `path` is, without its weights; raises as `load_model` does."""
    return _open(path)[0]


def read_shapes(path: Path) -> Mapping[str, tuple[int, ...]]:
    """Read the shape of every tensor of the model at `path`, by Hugging Face names; raises as `load_model` does."""
    return _open(path)[1].shapes


def load_model(path: Path, *, mode: WeightMode, backend: Backend, cache: WeightsCache | None = None) -> LoadedModel:
    """Load a GGUF file or a Hugging Face folder onto `backend`.

    With a `cache`, the first load leaves a prepared file there, and later ones map it and read no tensor of `path`; the
    values are the same bit for bit. Trouble with the cache costs time, never the model.

    Raises:
        ModelError: files are absent, damaged, incomplete, change meanwhile, or hold tensors or values the configuration
            does not allow.
        UnsupportedModel: an architecture, tensor type or setting this engine does not have; the message names it.
    """
    loading = _Loading.of(path, mode, backend)
    if cache is None or not cache.is_usable():
        with ThreadPoolExecutor(1, thread_name_prefix="weights-digest") as aside:
            hashing = aside.submit(weights_digest, loading.config, loading.files)
            model = loading.from_files(loading.parts)
            digest = hashing.result()
        loading.check_unchanged()
    else:
        digest = cache.digest(loading.config, loading.files)
        model = _cached(cache, prepared_name(digest, mode), loading)
    _return_free_memory()
    return LoadedModel(config=model.config, model=model, mode=mode, weights_digest=digest)


@dataclass(frozen=True, slots=True)
class _Loading:
    """One load of one model: what is read, as it was before anything was read."""

    path: Path
    config: ModelConfig
    files: tuple[Path, ...]
    states: tuple[FileState, ...]
    checkpoint: Checkpoint
    mode: WeightMode
    backend: Backend

    @classmethod
    def of(cls, path: Path, mode: WeightMode, backend: Backend) -> _Loading:
        before = states(_weight_files(path))
        config, source = _open(path)
        checkpoint = Checkpoint(source)
        checkpoint.require(f"model.layers.{config.num_layers - 1}.input_layernorm.weight")  # before work for any layer
        return cls(path, config, source.files, before, checkpoint, mode, backend)

    @property
    def parts(self) -> CheckpointParts:
        return CheckpointParts(self.checkpoint, self.mode)

    def from_files(self, parts: Parts) -> CausalModel:
        """Build from all tensors of the model's own files."""
        model = FAMILIES[self.config.architecture](self.config, parts, self.backend)
        self.checkpoint.finish()
        self.check_unchanged()
        return model

    def from_prepared(self, file: PreparedFile) -> CausalModel:
        """Build from what was prepared of the same files; raises Damaged."""
        parts = PreparedParts(file, self.checkpoint, self.mode)
        model = FAMILIES[self.config.architecture](self.config, parts, self.backend)
        file.let_go()
        self.check_unchanged()
        return model

    def check_unchanged(self) -> None:
        if states(_weight_files(self.path)) != self.states:
            raise ModelError(f"{self.path.name} changed while it was loaded; load it again")


def _cached(cache: WeightsCache, name: str, loading: _Loading) -> CausalModel:
    """Build from the prepared file, or from the model's own files while preparing one."""
    size, header_bytes = needed_bytes(loading.checkpoint.shapes, loading.mode)
    for _ in range(_CLAIMS):
        match cache.claim(name, size=size, header_bytes=header_bytes):
            case PreparedFile() as file:
                try:
                    return loading.from_prepared(file)
                except Damaged as damage:
                    file.discard(damage)
            case Draft() as draft:
                with closing(draft):
                    model = loading.from_files(RecordedParts(loading.parts, draft))
                    draft.publish()  # only now: the files that were read are the ones its name tells of
                    return model
            case None:
                break
    return loading.from_files(loading.parts)


def _open(path: Path) -> tuple[ModelConfig, TensorSource]:
    if path.is_dir():
        return folder_config(path), SafetensorsSource(path)
    if not path.is_file():
        raise ModelError(f"there is no model at {path}")
    source = GgufSource(path)
    return gguf_config(path, source), source


def _weight_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def _return_free_memory() -> None:
    """Have glibc give freed temporaries back to the system, about 100 MB here; other allocators do so by themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
