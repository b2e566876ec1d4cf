"""The Llama family (Llama, Mistral, Qwen2) over packed tokens [T, ...]: no padding, no globals."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twostroke.engine.attention import AttentionBackend, Plan
from twostroke.engine.backend import Backend
from twostroke.engine.config import ModelConfig
from twostroke.engine.loading.parts import Parts
from twostroke.engine.models import Begun
from twostroke.engine.models.ends import Ends, load_ends
from twostroke.engine.models.layers import Matrices, heads_of, layer_name, load_matrices, load_norm
from twostroke.engine.rope import inverse_frequencies, rotation


@dataclass(frozen=True, slots=True)
class Layer:
    """One block: attention, then the feed-forward, each after an RMSNorm and added to what came in."""

    attention_norm: Tensor  # [hidden], as is the other
    feed_forward_norm: Tensor
    matrices: Matrices


class Llama:
    """A CausalModel."""

    def __init__(self, config: ModelConfig, backend: Backend, ends: Ends, layers: tuple[Layer, ...]) -> None:
        self.config = config
        self.backend = backend
        self._ends = ends
        self._layers = layers
        self._frequencies = inverse_frequencies(config.rope, config.head_dim).to(backend.device)

    @torch.inference_mode()
    def begin(self, token_ids: Tensor, positions: Tensor) -> Begun:
        """Return hidden states and turns of int64 [T]."""
        return self._ends.embed(token_ids), rotation(self._frequencies, positions)

    @torch.inference_mode()
    def layers(self, begun: Begun, attention: AttentionBackend, plan: Plan) -> Tensor:
        """Run all layers; returns [T, hidden], in place."""
        hidden, turns = begun
        for index, layer in enumerate(self._layers):
            q, k, v = self._heads(index, hidden, turns)
            attended = attention.attend(index, q, k, v, plan)
            layer.matrices.output.add_to(hidden, attended.view(hidden.shape[0], -1))
            gate_up = layer.matrices.gate_up(self._normed(hidden, layer.feed_forward_norm))
            layer.matrices.down.add_to(hidden, self.backend.gated(gate_up, self.config.activation))
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Score the next token for each row of hidden [R, hidden]: float32 [R, vocab]."""
        return self._ends.head(self._normed(hidden, self._ends.norm)).float()

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return self.backend.rms_norm(hidden, weight, self.config.norm_eps)

    def _heads(self, index: int, hidden: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [T, H, D], keys and values [T, Hkv, D] of layer `index`, the first two rotated in one go."""
        config, qkv = self.config, self._qkv(index, hidden)
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)
        self.backend.rotate(heads[:, : config.num_heads + config.num_kv_heads], turns)
        return heads_of(config, qkv)

    def _qkv(self, index: int, hidden: Tensor) -> Tensor:
        layer = self._layers[index]
        return layer.matrices.qkv(self._normed(hidden, layer.attention_norm))


def build(config: ModelConfig, parts: Parts, backend: Backend) -> Llama:
    """Build the model from its parts; raises ModelError as they do."""
    ends = load_ends(config, parts, backend)
    return Llama(ends.settled(config), backend, ends, load_layers(config, parts, backend))


def load_layers(config: ModelConfig, parts: Parts, backend: Backend) -> tuple[Layer, ...]:
    """Build all layers; raises ModelError as `parts` do."""

    def layer(index: int) -> Layer:
        attention_norm, feed_forward_norm = (
            load_norm(config, parts, backend, layer_name(index) + name, config.hidden_size)
            for name in ("input_layernorm", "post_attention_layernorm")
        )
        return Layer(attention_norm, feed_forward_norm, load_matrices(config, parts, backend, index))

    return parts.layers(layer, config.num_layers)
