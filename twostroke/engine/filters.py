"""Which tokens may still be sampled: top-k, top-p and min-p over one row, with ties going to the lower id."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from twostroke.types import SamplingParams

_FIRST_LOOK = 256  # tokens sorted before asking whether top-p needs more; a full sort costs 3 ms at 49k tokens


def largest(values: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest values, largest first and the lower id first among equals: int64 [count].

    `torch.topk` says nothing about ties, so it only finds the threshold.
    """
    threshold = torch.topk(values, count).values[-1]
    ids = (values >= threshold).nonzero().squeeze(1)
    order = torch.sort(values[ids], descending=True, stable=True).indices
    return ids[order[:count]]


def survivors(scaled: Tensor, params: SamplingParams) -> Tensor | None:
    """Ids that pass the filters, most likely first, or None when all of them do.

    Every filter keeps a head of the tokens in order of likelihood, so together they keep the shortest head.
    Top-p counts the mass that top-k left; min-p compares with the most likely token, which no filter removes.

    Args:
        scaled: float64 [V], logits less their maximum, over temperature; the largest is 0.
        params: top_k, top_p and min_p.
    Source: top-p, Holtzman et al. 2020, arXiv:1904.09751: the smallest head whose mass reaches p;
        min-p, Nguyen et al. 2024, arXiv:2407.01082.
    """
    size = scaled.numel()
    limit = min(params.top_k or size, size)
    floor = math.log(params.min_p) if params.min_p > 0 else -math.inf
    if limit == size and params.top_p >= 1 and params.min_p <= 0:
        return None
    if params.top_p < 1:
        ids = _nucleus(scaled, limit, params.top_p)
    elif limit < size:
        ids = largest(scaled, limit)
    else:
        ids = (scaled >= floor).nonzero().squeeze(1)
    return ids[scaled[ids] >= floor]


def _nucleus(scaled: Tensor, limit: int, top_p: float) -> Tensor:
    """The shortest head of the `limit` most likely tokens that holds `top_p` of their mass."""
    size = scaled.numel()
    if limit < size:
        ids = largest(scaled, limit)
        total = scaled[ids].exp().sum()
    else:
        ids = largest(scaled, min(limit, _FIRST_LOOK))
        total = scaled.exp().sum()
    while True:
        mass = scaled[ids].exp()
        before = mass.cumsum(0) - mass
        kept = max(1, int((before < top_p * total).sum()))
        if kept < len(ids) or len(ids) == limit:
            return ids[:kept]
        ids = largest(scaled, min(limit, 8 * len(ids)))
