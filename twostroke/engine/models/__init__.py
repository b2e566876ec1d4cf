"""Model families: what the runner needs of each, and which file builds which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from twostroke.engine.attention import AttentionBackend, Plan
from twostroke.engine.backend import Backend
from twostroke.engine.config import ModelConfig
from twostroke.engine.loading.parts import Parts

Begun = tuple[Tensor, ...]  # what goes into the layers, each with one row a token: first the hidden states


class CausalModel(Protocol):
    """What the runner needs of a model. A new architecture is one file that satisfies this and one registry line."""

    config: ModelConfig
    backend: Backend

    def begin(self, token_ids: Tensor, positions: Tensor) -> Begun:
        """Look tokens (int64 [T]) at positions (int64 [T]) up: [T, hidden], and whatever else the layers want."""

    def layers(self, begun: Begun, attention: AttentionBackend, plan: Plan) -> Tensor:
        """Run what has begun through all layers; the hidden states [T, hidden] are changed in place, and returned."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Score the next token for each row of hidden [R, hidden]: float32 [R, vocab]."""


Builder = Callable[[ModelConfig, Parts, Backend], CausalModel]


def forward(
    model: CausalModel, token_ids: Tensor, positions: Tensor, attention: AttentionBackend, plan: Plan
) -> Tensor:
    """Run tokens (int64 [T]) at positions (int64 [T]) through all layers; returns [T, hidden]."""
    return model.layers(model.begin(token_ids, positions), attention, plan)
