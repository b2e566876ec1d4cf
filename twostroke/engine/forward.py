"""How a step's tokens go through the model: one kernel after the other, unless a device has something better."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from twostroke.engine.attention import AttentionBackend
from twostroke.engine.batch import Batch
from twostroke.engine.cuda.fence import upload
from twostroke.engine.models import CausalModel, forward


class Forward(Protocol):
    """A model's layers over its pages, driven by one thread."""

    def prepare(self) -> None:
        """Do once what would otherwise delay the first steps; may take seconds."""

    def __call__(self, batch: Batch) -> Tensor:
        """Run a batch of T tokens; returns [T, hidden], which is good until the next call."""


class EagerForward:
    """Runs the model as it is written."""

    def __init__(self, model: CausalModel, attention: AttentionBackend) -> None:
        self._model, self._attention = model, attention

    def prepare(self) -> None:
        """Nothing is prepared."""

    def __call__(self, batch: Batch) -> Tensor:
        """Send the batch to the model's device and run it."""
        device = self._model.backend.device
        plan = self._attention.plan(batch)
        token_ids, positions = upload(batch.token_ids, device), upload(batch.positions, device)
        return forward(self._model, token_ids, positions, self._attention, plan)
