"""Changes to rows of logits before they are sampled: penalties, bias and bans, each in one scatter over all rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from twostroke.engine.history import TokenHistory
from twostroke.types import SamplingParams


def penalize(logits: Tensor, rows: Mapping[int, tuple[SamplingParams, TokenHistory]]) -> None:
    """Apply the repetition, then the presence and frequency penalties in place.

    Args:
        logits: float32 [R, V].
        rows: for each row to change, the strengths and what it has said: tokens of the prompt (repetition only) and
            the generated ones with their counts.
    Source: repetition, Keskar et al. 2019, arXiv:1909.05858, section 4.1, with the sign rule for negative logits;
        presence and frequency, the OpenAI API reference.
    """
    histories = [history for _, history in rows.values()]
    sizes = [len(history.ids) for history in histories]
    strengths = [[each.repetition_penalty, each.presence_penalty, each.frequency_penalty] for each, _ in rows.values()]
    table = torch.tensor(strengths, dtype=torch.float32).repeat_interleave(torch.tensor(sizes), dim=0)
    repetition, presence, frequency = table.to(logits.device).unbind(1)
    counts = torch.from_numpy(np.concatenate([history.counts for history in histories])).to(logits.device)
    ids = torch.from_numpy(np.concatenate([history.ids for history in histories])).to(logits.device)
    owners = torch.tensor(list(rows)).repeat_interleave(torch.tensor(sizes)).to(logits.device)
    chosen = logits[owners, ids]
    chosen = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
    logits[owners, ids] = chosen - (presence * (counts > 0) + frequency * counts)


def add_bias(logits: Tensor, rows: Mapping[int, Mapping[int, float]]) -> None:
    """Add to each row's logits the biases of its tokens, in place; logits are float32 [R, V]."""
    values = [value for bias in rows.values() for value in bias.values()]
    logits[_places(rows, logits.device)] += torch.tensor(values, dtype=torch.float32, device=logits.device)


def ban(logits: Tensor, rows: Mapping[int, Collection[int]]) -> None:
    """Make each row's tokens impossible, in place; logits are float32 [R, V]."""
    logits[_places(rows, logits.device)] = -torch.inf


def _places(rows: Mapping[int, Collection[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and id of every token."""
    places = [(row, token) for row, tokens in rows.items() for token in tokens]
    owners, ids = torch.tensor(places, dtype=torch.int64, device=device).T
    return owners, ids
