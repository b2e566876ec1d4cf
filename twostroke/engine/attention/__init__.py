"""Paged attention behind two verbs: `plan` once a step, `attend` once a layer.

Import a backend from its own module, so that none is loaded that is not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from twostroke.engine.batch import Batch

Plan = Any  # what a backend's `plan` returned; only the same backend's `attend` looks inside


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What a model's attention is like, apart from its cache."""

    heads: int  # of queries
    kv_heads: int
    head_dim: int
    scale: float  # scores are multiplied by it before the softmax
    windows: tuple[int | None, ...]  # for each layer, how many of the latest tokens a query sees, itself included


class AttentionBackend(Protocol):
    """Paged attention on one device. `reference` is the truth; tests/parity holds the rest to it."""

    def plan(self, batch: Batch) -> Plan:
        """Do the work of a step that is the same for every layer: row numbers, masks, kernel schedules."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        """Write k, v [T, Hkv, D] into their pages, then attend q [T, H, D] to all up to itself; returns [T, H, D].

        The three may be views with a stride between tokens; heads and their dimensions are contiguous.
        """


def as_kept(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn keys or values into a cache's dtype.

    What it cannot hold becomes NaN: an infinite key could leave a score of -inf, a token that is silently passed over.
    """
    if numbers.dtype == dtype:
        return numbers
    nan = float("nan")
    return numbers.to(dtype).nan_to_num_(nan=nan, posinf=nan, neginf=nan)
