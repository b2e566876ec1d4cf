"""Which tokens may still be sampled: top-k, top-p and min-p over rows of logits, with ties going to the lower id.

A row's gaps say how far each of its logits lies below the highest: float32, 0 for the most likely token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twostroke.types import SamplingParams

_FIRST_LOOK = 256  # tokens sorted before asking whether a filter needs more; a full sort costs 3 ms a row of 49k
_NEXT_LOOK = 16  # times as many
_UNIT = 2.0**40  # integers for the mass of the most likely token; room for 2**22 tokens


def is_filtered(params: SamplingParams, size: int) -> bool:
    """Whether some filter can remove one of `size` tokens."""
    return 0 < params.top_k < size or params.top_p < 1 or params.min_p > 0


def nearest(gaps: Tensor, count: int) -> Tensor:
    """Ids of the `count` most likely tokens of each row, the most likely first: int64 [R, count].

    `torch.topk` says nothing about ties, so there are none: the bits of a gap, which is not negative, are ordered as
    an integer, and the id below them makes each key unique.
    """
    keys = gaps.abs().view(torch.int32).to(torch.int64).bitwise_left_shift_(32)  # -0.0 - 0.0 is a gap, too
    keys += torch.arange(gaps.shape[1], device=gaps.device)
    return torch.topk(keys, count, largest=False).values.bitwise_and_((1 << 32) - 1)


def survivors(gaps: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Rows and ids of the tokens that pass their row's filters: int64 [n] each, the rows in no order.

    Every filter keeps a head of the tokens in order of likelihood, so together they keep the shortest head. Top-p
    counts the mass that top-k left; min-p compares with the most likely token, which no filter removes.

    Args:
        gaps: float32 [R, V].
        params: R of them, with a temperature above 0.
    Source: top-p, Holtzman et al. 2020, arXiv:1904.09751: the smallest head whose mass reaches p;
        min-p, Nguyen et al. 2024, arXiv:2407.01082.
    """
    size = gaps.shape[1]
    limits = _Limits.of(params, gaps)
    totals = _masses(limits.scores(gaps)).sum(1, keepdim=True) if _need_totals(params, size) else limits.counts
    rows, look = torch.arange(len(gaps), device=gaps.device), _FIRST_LOOK
    found = []
    while len(rows):
        look = min(look, size)
        ids, kept, settled = _heads(gaps[rows], limits.at(rows), totals[rows], look)
        places, ranks = (kept & settled).nonzero(as_tuple=True)
        found.append((rows[places], ids[places, ranks]))
        rows, look = rows[~settled.squeeze(1)], look * _NEXT_LOOK
    return torch.cat([each for each, _ in found]), torch.cat([ids for _, ids in found])


@dataclass(frozen=True, slots=True)
class _Limits:
    """The filters of R rows, [R, 1] each; one that is off lets everything pass."""

    temperatures: Tensor  # float64
    counts: Tensor  # int64, of top-k
    shares: Tensor  # float64, of top-p
    floors: Tensor  # float64, of min-p: the least score

    @classmethod
    def of(cls, params: Sequence[SamplingParams], gaps: Tensor) -> _Limits:
        size = gaps.shape[1]
        counts = [min(each.top_k or size, size) for each in params]
        rest = [
            (
                each.temperature,
                each.top_p if each.top_p < 1 else math.inf,
                math.log(each.min_p) if each.min_p > 0 else -math.inf,
            )
            for each in params
        ]
        temperatures, shares, floors = torch.tensor(rest, dtype=torch.float64, device=gaps.device).T[..., None]
        return cls(temperatures, torch.tensor(counts, device=gaps.device)[:, None], shares, floors)

    def at(self, rows: Tensor) -> _Limits:
        return _Limits(self.temperatures[rows], self.counts[rows], self.shares[rows], self.floors[rows])

    def scores(self, gaps: Tensor) -> Tensor:
        """Logits less their maximum, over temperature: float64."""
        return gaps.to(torch.float64).neg_().div_(self.temperatures)


def _heads(gaps: Tensor, limits: _Limits, totals: Tensor, look: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `look` most likely tokens of each row, which of them are kept, and whether none beyond can be.

    `totals` holds the mass of rows without top-k; where top-k is in force, the mass it leaves is seen with its last.
    """
    ids = nearest(gaps, look)
    scores = limits.scores(gaps.gather(1, ids))
    within = torch.arange(look, device=gaps.device) < limits.counts
    mass = _masses(scores).mul_(within)
    totals = torch.where(limits.counts <= look, mass.sum(1, keepdim=True), totals)
    before = mass.cumsum(1).sub_(mass)
    kept = within & (before < limits.shares * totals) & (scores >= limits.floors)
    ended = (limits.counts == gaps.shape[1]) & ~kept[:, -1:]
    return ids, kept, ended | (limits.counts <= look)


def _masses(scores: Tensor) -> Tensor:
    """Masses in units: int64. Sums of integers are the same in every order, on every device and in every batch."""
    return scores.exp().mul_(_UNIT).to(torch.int64)


def _need_totals(params: Sequence[SamplingParams], size: int) -> bool:
    return any(each.top_p < 1 and not 0 < each.top_k < size for each in params)
