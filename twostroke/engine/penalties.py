"""Changes to one row of logits before it is sampled: penalties, bias and bans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from twostroke.engine.history import TokenHistory
from twostroke.types import SamplingParams


def penalize(logits: Tensor, params: SamplingParams, history: TokenHistory) -> None:
    """Apply the repetition, then the presence and frequency penalties in place.

    Args:
        logits: float32 [V], one row.
        params: the strengths.
        history: tokens of the prompt (repetition only) and the generated ones with their counts.
    Source: repetition, Keskar et al. 2019, arXiv:1909.05858, section 4.1, with the sign rule for negative logits;
        presence and frequency, the OpenAI API reference.
    """
    ids = torch.from_numpy(np.array(history.ids))
    counts = torch.from_numpy(np.array(history.counts))
    chosen = logits[ids]
    if params.repetition_penalty != 1.0:
        strength = params.repetition_penalty
        chosen = torch.where(chosen > 0, chosen / strength, chosen * strength)
    chosen -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
    logits[ids] = chosen


def add_bias(logits: Tensor, bias: Mapping[int, float]) -> None:
    """Add each token's bias to its logit, in place; logits are float32 [V]."""
    ids = torch.tensor(list(bias), dtype=torch.int64)
    logits[ids] += torch.tensor(list(bias.values()), dtype=torch.float32)


def ban(logits: Tensor, ids: Iterable[int]) -> None:
    """Make tokens impossible, in place; logits are float32 [V]."""
    logits[torch.tensor(list(ids), dtype=torch.int64)] = -torch.inf
