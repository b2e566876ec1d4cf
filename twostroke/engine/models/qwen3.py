"""Qwen3 (arXiv:2505.09388): the Llama family with a norm of each query and key head."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from twostroke.engine.backend import Backend
from twostroke.engine.config import ModelConfig
from twostroke.engine.loading.parts import Parts
from twostroke.engine.models.ends import Ends, load_ends
from twostroke.engine.models.layers import HeadNorms, load_head_norms, normed_heads
from twostroke.engine.models.llama import Layer, Llama, load_layers


class Qwen3(Llama):
    """A CausalModel."""

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        ends: Ends,
        layers: tuple[Layer, ...],
        head_norms: tuple[HeadNorms, ...],
    ) -> None:
        super().__init__(config, backend, ends, layers)
        self._head_norms = head_norms

    def _heads(self, index: int, hidden: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return normed_heads(self.config, self.backend, self._qkv(index, hidden), self._head_norms[index], turns)


def build(config: ModelConfig, parts: Parts, backend: Backend) -> Qwen3:
    """Build the model from its parts; raises ModelError as they do."""
    ends, layers = load_ends(config, parts, backend), load_layers(config, parts, backend)
    head_norms = parts.layers(partial(load_head_norms, config, parts, backend), config.num_layers)
    return Qwen3(ends.settled(config), backend, ends, layers, head_norms)
