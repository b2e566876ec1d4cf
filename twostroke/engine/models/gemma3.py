"""Gemma 3's text models (arXiv:2503.19786): most layers look back through a window and rotate in a way of their own."""

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
from twostroke.engine.models.layers import (
    HeadNorms,
    Matrices,
    layer_name,
    load_head_norms,
    load_matrices,
    load_norm,
    normed_heads,
)
from twostroke.engine.rope import inverse_frequencies, rotation


@dataclass(frozen=True, slots=True)
class Layer:
    """One block: attention, then the feed-forward, each between two RMSNorms and added to what came in."""

    local: bool  # has a window
    before_attention: Tensor  # [hidden], as are the other three
    after_attention: Tensor
    before_feed_forward: Tensor
    after_feed_forward: Tensor
    head_norms: HeadNorms
    matrices: Matrices


class Gemma3:
    """A CausalModel."""

    def __init__(self, config: ModelConfig, backend: Backend, ends: Ends, layers: tuple[Layer, ...]) -> None:
        self.config = config
        self.backend = backend
        self._ends = ends
        self._layers = layers
        # Rounded as activations are, since the models were trained with it so; in float32 it is not rounded.
        self._embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=backend.dtype, device=backend.device)
        self._frequencies, self._local_frequencies = (
            inverse_frequencies(rope, config.head_dim).to(backend.device)
            for rope in (config.rope, config.rope_of_windows)
        )

    @torch.inference_mode()
    def begin(self, token_ids: Tensor, positions: Tensor) -> Begun:
        """Return hidden states, turns, and turns of layers with a window, of int64 [T]."""
        hidden = self._ends.embed(token_ids).mul_(self._embedding_scale)
        return hidden, rotation(self._frequencies, positions), rotation(self._local_frequencies, positions)

    @torch.inference_mode()
    def layers(self, begun: Begun, attention: AttentionBackend, plan: Plan) -> Tensor:
        """Run all layers; returns [T, hidden], in place."""
        hidden, turns, local_turns = begun
        for index, layer in enumerate(self._layers):
            qkv = layer.matrices.qkv(self._normed(hidden, layer.before_attention))
            q, k, v = normed_heads(
                self.config, self.backend, qkv, layer.head_norms, local_turns if layer.local else turns
            )
            attended = layer.matrices.output(attention.attend(index, q, k, v, plan).view(hidden.shape[0], -1))
            self.backend.add(hidden, self._normed(attended, layer.after_attention))
            gate_up = layer.matrices.gate_up(self._normed(hidden, layer.before_feed_forward))
            fed = layer.matrices.down(self.backend.gated(gate_up, self.config.activation))
            self.backend.add(hidden, self._normed(fed, layer.after_feed_forward))
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Score the next token for each row of hidden [R, hidden]: float32 [R, vocab]."""
        return self._ends.head(self._normed(hidden, self._ends.norm)).float()

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return self.backend.rms_norm(hidden, weight, self.config.norm_eps)


def build(config: ModelConfig, parts: Parts, backend: Backend) -> Gemma3:
    """Build the model from its parts; raises ModelError as they do."""

    def layer(index: int) -> Layer:
        def norm(name: str) -> Tensor:
            return load_norm(config, parts, backend, layer_name(index) + name, config.hidden_size)

        return Layer(
            local=config.windows[index] is not None,
            before_attention=norm("input_layernorm"),
            after_attention=norm("post_attention_layernorm"),
            before_feed_forward=norm("pre_feedforward_layernorm"),
            after_feed_forward=norm("post_feedforward_layernorm"),
            head_norms=load_head_norms(config, parts, backend, index),
            matrices=load_matrices(config, parts, backend, index),
        )

    ends = load_ends(config, parts, backend)
    return Gemma3(ends.settled(config), backend, ends, parts.layers(layer, config.num_layers))
