"""What the layers of all families here have in common: four fused matrices, and heads cut from the first."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from twostroke.engine.backend import Backend, Linear
from twostroke.engine.config import ModelConfig
from twostroke.engine.loading.parts import Parts


@dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices of one layer: attention, then the gated feed-forward (arXiv:2002.05202)."""

    qkv: Linear  # queries, keys and values of all heads, in this order
    output: Linear
    gate_up: Linear  # gate, then up
    down: Linear


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorms of each query head and key head before they are rotated (arXiv:2010.04245)."""

    query: Tensor  # [head_dim], as is the other
    key: Tensor


def layer_name(index: int) -> str:
    """Return what the names of a layer's tensors begin with."""
    return f"model.layers.{index}."


def load_matrices(config: ModelConfig, parts: Parts, backend: Backend, index: int) -> Matrices:
    """Build the matrices of layer `index`; raises ModelError as `parts` do."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, feed_forward = layer_name(index) + "self_attn.", layer_name(index) + "mlp."
    heads = [(attention + "q_proj", q), (attention + "k_proj", kv), (attention + "v_proj", kv)]
    gate_up = [(feed_forward + "gate_proj", inner), (feed_forward + "up_proj", inner)]
    return Matrices(
        qkv=backend.linear(parts.matrix(*heads, columns=hidden, bias=config.attention_bias)),
        output=backend.linear(parts.matrix((attention + "o_proj", hidden), columns=q, bias=config.output_bias)),
        gate_up=backend.linear(parts.matrix(*gate_up, columns=hidden)),
        down=backend.linear(parts.matrix((feed_forward + "down_proj", hidden), columns=inner)),
    )


def load_norm(config: ModelConfig, parts: Parts, backend: Backend, name: str, size: int) -> Tensor:
    """Build the norm `name`.weight [size], as it multiplies."""
    return backend.vector(parts.vector(f"{name}.weight", size) + config.norm_offset)


def load_head_norms(config: ModelConfig, parts: Parts, backend: Backend, index: int) -> HeadNorms:
    """Build the norms of layer `index`'s heads."""
    attention = layer_name(index) + "self_attn."
    query, key = (load_norm(config, parts, backend, f"{attention}{part}_norm", config.head_dim) for part in ("q", "k"))
    return HeadNorms(query, key)


def heads_of(config: ModelConfig, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """View [T, (H + 2 Hkv) D] as queries [T, H, D], keys and values [T, Hkv, D]: strided between tokens."""
    heads = qkv.view(qkv.shape[0], -1, config.head_dim)
    first_key, first_value = config.num_heads, config.num_heads + config.num_kv_heads
    return heads[:, :first_key], heads[:, first_key:first_value], heads[:, first_value:]


def normed_heads(
    config: ModelConfig, backend: Backend, qkv: Tensor, norms: HeadNorms, turns: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut [T, (H + 2 Hkv) D] into heads; queries and keys come back normed, then rotated."""
    queries, keys, values = heads_of(config, qkv)
    queries = backend.rms_norm(queries, norms.query, config.norm_eps)
    keys = backend.rms_norm(keys, norms.key, config.norm_eps)
    backend.rotate(queries, turns)
    backend.rotate(keys, turns)
    return queries, keys, values
