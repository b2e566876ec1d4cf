"""Log-probabilities of the raw logits, for the tokens that were chosen and for the most likely ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twostroke.engine.filters import nearest
from twostroke.types import Token


def with_logprobs(
    logits: Tensor, chosen: Sequence[tuple[Token, ...]], alternatives: Sequence[int]
) -> list[tuple[Token, ...]]:
    """The chosen tokens with their log-probabilities: natural logarithms, computed in float64.

    Args:
        logits: float32 [R, V].
        chosen: tokens of each of the R rows.
        alternatives: how many of its most likely tokens each row reports, the lower id first of equals.
    """
    count = min(max(alternatives), logits.shape[1])
    best = nearest(logits.amax(dim=1, keepdim=True) - logits, count)
    ids = torch.tensor([token.id for tokens in chosen for token in tokens], dtype=torch.int64, device=logits.device)
    owners = [row for row, tokens in enumerate(chosen) for _ in tokens]
    logprobs = logits.to(torch.float64).log_softmax(dim=1)
    own = iter(logprobs[torch.tensor(owners, device=logits.device), ids].tolist())
    heads = zip(best.tolist(), logprobs.gather(1, best).tolist(), strict=True)
    told = []
    for tokens, wanted, (top_ids, values) in zip(chosen, alternatives, heads, strict=True):
        top = tuple(zip(top_ids[:wanted], values[:wanted], strict=True))
        told.append(tuple(Token(token.id, next(own), top) for token in tokens))
    return told
