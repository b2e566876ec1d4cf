"""Whether generated tokens are right, when kernels may round differently at different batch shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rejection:
    """A token that rounding does not excuse."""

    position: int  # index among the judged tokens
    token: int
    best: int
    shortfall: float  # how far the token's score lies below the best


def rejections(scores: Tensor, tokens: Sequence[int], *, bound: float) -> list[Rejection]:
    """Judge greedy or Gumbel-max tokens by teacher forcing.

    The reference ran over our tokens; each of them must score within twice the bound of the best, because the bound may
    have lowered one score and raised the other.
    Args:
        scores: what the choice maximizes, float [n, V]; row i was computed after tokens[:i]. Logits when greedy.
        tokens: the n tokens that were chosen.
        bound: largest difference between two kernels' scores of the same token.
    Returns: the tokens beyond that; empty when all are right.
    """
    best, winners = scores.max(dim=-1)
    found = []
    for position, token in enumerate(tokens):
        shortfall = float(best[position] - scores[position, token])
        if not shortfall <= 2 * bound:  # NaN is rejected too
            found.append(Rejection(position, token, int(winners[position]), shortfall))
    return found
