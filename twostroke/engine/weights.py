"""From a path to a model that can run: nothing missing, nothing unused, nothing random."""

from __future__ import annotations

import ctypes
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from twostroke.engine.config import ModelConfig
from twostroke.engine.linear import Linear, LinearFactory, WeightMode, has_packed_kernels
from twostroke.engine.loading.checkpoint import Checkpoint, TensorSource, weights_digest
from twostroke.engine.loading.folder import folder_config
from twostroke.engine.loading.gguf_config import gguf_config
from twostroke.engine.loading.gguf_tensors import GgufSource
from twostroke.engine.loading.shards import SafetensorsSource
from twostroke.engine.model import CausalModel, Decoder, Layer
from twostroke.errors import ModelError
from twostroke.kv.format import KvFormat

__all__ = ["LoadedModel", "WeightMode", "load_model", "read_config"]

_log = logging.getLogger(__name__)
_LOAD_THREADS = 2
_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory, and the identity of its values."""

    config: ModelConfig
    model: CausalModel
    mode: WeightMode
    weights_digest: bytes  # 16 bytes over the files and the arithmetic; the mode is told apart by KvFormat

    def kv_format(self, *, block_tokens: int = 16, dtype: str = "float32") -> KvFormat:
        """Name the bytes that this model's keys and values make."""
        return KvFormat(
            model=self.config.name,
            weights_digest=self.weights_digest,
            weight_mode=self.mode.value,
            layers=self.config.num_layers,
            kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            block_tokens=block_tokens,
            dtype=dtype,
            rope_digest=self.config.rope.digest,
        )


def read_config(path: Path) -> ModelConfig:
    """Read what the model at `path` is, without its weights; raises as `load_model` does."""
    return _open(path)[0]


def load_model(path: Path, *, mode: WeightMode) -> LoadedModel:
    """Load a GGUF file or a Hugging Face folder.

    Raises:
        ModelError: files are absent, damaged, incomplete, or hold tensors or values the configuration does not allow.
        UnsupportedModel: an architecture, tensor type or setting this engine does not have; the message names it.
    """
    config, source = _open(path)
    checkpoint = Checkpoint(source)
    with ThreadPoolExecutor(_LOAD_THREADS, thread_name_prefix="load-model") as threads:
        digest = threads.submit(weights_digest, config, source.files)
        try:
            model = _assemble(config, checkpoint, LinearFactory(mode, packs=has_packed_kernels()), threads)
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)  # one bad tensor: do not load the rest first
            raise
        checkpoint.finish()
        _return_free_memory()
        return LoadedModel(config=model.config, model=model, mode=mode, weights_digest=digest.result())


def _open(path: Path) -> tuple[ModelConfig, TensorSource]:
    if path.is_dir():
        return folder_config(path), SafetensorsSource(path)
    if not path.is_file():
        raise ModelError(f"there is no model at {path}")
    source = GgufSource(path)
    return gguf_config(path, source), source


def _assemble(
    config: ModelConfig, checkpoint: Checkpoint, factory: LinearFactory, threads: ThreadPoolExecutor
) -> CausalModel:
    """Build all parts, a few at a time: reading, packing and hashing release the interpreter lock."""
    checkpoint.require(f"model.layers.{config.num_layers - 1}.input_layernorm.weight")  # before work for any layer
    layers = [threads.submit(_layer, index, config, checkpoint, factory) for index in range(config.num_layers)]
    embeddings, head = _ends(config, checkpoint, factory)
    norm = checkpoint.take("model.norm.weight", config.hidden_size)
    config = replace(config, tied_embeddings=not checkpoint.has(_HEAD))
    return Decoder(config, embeddings, tuple(layer.result() for layer in layers), norm, head)


def _ends(config: ModelConfig, checkpoint: Checkpoint, factory: LinearFactory) -> tuple[Tensor, Linear]:
    """Build the embeddings and the output head; a head that is not in the files is the embeddings."""
    shape = (config.vocab_size, config.hidden_size)
    weight = checkpoint.take(_EMBEDDINGS, *shape)
    embeddings = factory.embedding(_EMBEDDINGS, weight)
    if checkpoint.has(_HEAD):
        return embeddings, factory.linear(_HEAD, checkpoint.take(_HEAD, *shape))
    if not config.tied_embeddings:
        _log.warning("the files hold no %s though the configuration unties it: the embeddings serve as head", _HEAD)
    return embeddings, factory.linear(_EMBEDDINGS, weight)


def _layer(index: int, config: ModelConfig, checkpoint: Checkpoint, factory: LinearFactory) -> Layer:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    prefix = f"model.layers.{index}."

    def matrix(*parts: tuple[str, int], columns: int, bias: bool = False) -> Linear:
        weights = [checkpoint.take(f"{prefix}{name}.weight", rows, columns) for name, rows in parts]
        biases = [checkpoint.take(f"{prefix}{name}.bias", rows) for name, rows in parts] if bias else []
        return factory.linear(prefix + parts[0][0], torch.cat(weights), torch.cat(biases) if biases else None)

    attention = [("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)]
    return Layer(
        attention_norm=checkpoint.take(prefix + "input_layernorm.weight", hidden),
        qkv=matrix(*attention, columns=hidden, bias=config.attention_bias),
        output=matrix(("self_attn.o_proj", hidden), columns=q, bias=config.output_bias),
        feed_forward_norm=checkpoint.take(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=matrix(("mlp.gate_proj", inner), ("mlp.up_proj", inner), columns=hidden),
        down=matrix(("mlp.down_proj", hidden), columns=inner),
    )


def _return_free_memory() -> None:
    """Have glibc give freed temporaries back to the system, about 100 MB here; other allocators do so by themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
