"""The decoder of the Llama family (Llama, Mistral, Qwen2) over packed tokens [T, ...]: no padding, no globals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, silu

from twostroke.engine.attention import AttentionBackend, Plan
from twostroke.engine.config import ModelConfig
from twostroke.engine.linear import Linear
from twostroke.engine.rope import inverse_frequencies, rotate, rotation


class CausalModel(Protocol):
    """What the runner needs of a model. A new architecture is one file that satisfies this and one registry line."""

    config: ModelConfig

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend, plan: Plan) -> Tensor:
        """Run tokens (int64 [T]) at positions (int64 [T]) through all layers; returns float32 [T, hidden]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Score the next token for each row of hidden [R, hidden]: float32 [R, vocab]."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One block: attention, then the gated feed-forward (SwiGLU, arXiv:2002.05202), each after an RMSNorm."""

    attention_norm: Tensor  # float32 [hidden], as is the other
    qkv: Linear  # queries, keys and values of all heads, in this order
    output: Linear
    feed_forward_norm: Tensor
    gate_up: Linear  # gate, then up
    down: Linear


class Decoder:
    """A CausalModel built from ready matrices."""

    def __init__(
        self, config: ModelConfig, embeddings: Tensor, layers: tuple[Layer, ...], norm: Tensor, head: Linear
    ) -> None:
        self.config = config
        self._embeddings = embeddings  # [vocab, hidden], float32 or float16
        self._layers = layers
        self._norm = norm
        self._head = head
        self._frequencies = inverse_frequencies(config.rope, config.head_dim)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend, plan: Plan) -> Tensor:
        """Run tokens (int64 [T]) at positions (int64 [T]) through all layers; returns float32 [T, hidden]."""
        hidden = embedding(token_ids, self._embeddings).float()
        cos, sin = rotation(self._frequencies, positions)
        for index, layer in enumerate(self._layers):
            q, k, v = self._heads(layer.qkv(self._normed(hidden, layer.attention_norm)), cos, sin)
            attended = attention.attend(index, q, k, v, plan)
            hidden = hidden + layer.output(attended.reshape(hidden.shape[0], -1))
            gate, up = layer.gate_up(self._normed(hidden, layer.feed_forward_norm)).chunk(2, dim=-1)
            hidden = hidden + layer.down(silu(gate) * up)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Score the next token for each row of hidden [R, hidden]: float32 [R, vocab]."""
        return self._head(self._normed(hidden, self._norm))

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(hidden, weight.shape, weight, self.config.norm_eps)

    def _heads(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split [T, (H + 2 Hkv) D] into heads; queries and keys come back rotated."""
        config = self.config
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)
        rotated = rotate(heads[:, : config.num_heads + config.num_kv_heads], cos, sin)
        return rotated[:, : config.num_heads], rotated[:, config.num_heads :], heads[:, -config.num_kv_heads :]
