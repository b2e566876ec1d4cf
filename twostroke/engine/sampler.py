"""From logits to tokens. A row's outcome depends on that row alone: never on its batch mates or its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twostroke.engine.filters import largest, survivors
from twostroke.engine.history import TokenHistory
from twostroke.engine.noise import gumbel, stream_key
from twostroke.engine.penalties import add_bias, ban, penalize
from twostroke.types import SamplingParams, Token


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What one row of logits is sampled for."""

    params: SamplingParams
    position: int  # of the new token in the whole sequence
    choices: tuple[int, ...] = (0,)  # one token is drawn for each
    history: TokenHistory | None = None  # what the penalties look at; None when none is in force
    banned: frozenset[int] = frozenset()

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the highest raw logit is the whole answer."""
        params = self.params
        adjusted = self.history is not None or self.banned or params.logit_bias
        return params.temperature == 0 and params.logprobs is None and not adjusted


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[tuple[Token, ...] | None]:
    """Draw each row's tokens in the order that SamplingParams states.

    Everything but the maximum is computed row by row, and a maximum is exact, so rows cannot disturb each other.

    Args:
        logits: float32 [R, V].
        draws: R of them.
    Returns: a token per choice for each row; None for a row that is not finite or leaves no token to choose.
    """
    highest, ids = logits.max(dim=1)  # of equals the first; a NaN anywhere in a row wins
    finite, greedy = highest.isfinite().tolist(), ids.tolist()
    sampled: list[tuple[Token, ...] | None] = []
    for row, draw in enumerate(draws):
        if not finite[row]:
            sampled.append(None)
        elif draw.is_plain_greedy:
            sampled.append((Token(greedy[row]),) * len(draw.choices))
        else:
            sampled.append(_drawn(logits[row], draw))
    return sampled


def _drawn(raw: Tensor, draw: Draw) -> tuple[Token, ...] | None:
    row = _adjusted(raw, draw)
    highest, index = row.max(dim=0)
    if not highest.isfinite():
        return None
    if draw.params.temperature == 0:
        chosen = [int(index)] * len(draw.choices)
    else:
        # float64: the smallest temperature neither overflows nor turns 0 / 0.
        chosen = _gumbel_max((row - highest).to(torch.float64) / draw.params.temperature, draw)
    return _reported(raw, chosen, draw.params.logprobs)


def _adjusted(raw: Tensor, draw: Draw) -> Tensor:
    """The row after penalties, bias and bans; the raw row stays as it is, for log-probabilities."""
    row = raw.clone()
    if draw.history is not None:
        penalize(row, draw.params, draw.history)
    if draw.params.logit_bias:
        add_bias(row, draw.params.logit_bias)
    if draw.banned:
        ban(row, draw.banned)
    return row


def _gumbel_max(scaled: Tensor, draw: Draw) -> list[int]:
    """One token per choice: the survivor with the highest score plus noise, the lower id among equals."""
    kept = survivors(scaled, draw.params)
    if kept is None:
        ids, scores = torch.arange(scaled.numel()), scaled
    else:
        ids = kept.sort().values  # the maximum below is the first of equals
        scores = scaled[ids]
    chosen = []
    for choice in draw.choices:
        noisy = gumbel(stream_key(draw.params.seed, choice, draw.position), ids).add_(scores)
        chosen.append(int(ids[noisy.max(dim=0).indices]))
    return chosen


def _reported(raw: Tensor, chosen: list[int], alternatives: int | None) -> tuple[Token, ...]:
    """Tokens with log-probabilities of the raw distribution, when asked for."""
    if alternatives is None:
        return tuple(map(Token, chosen))
    logprobs = raw.to(torch.float64)
    logprobs -= logprobs.logsumexp(dim=0)
    best = largest(raw, min(alternatives, raw.numel())).tolist() if alternatives else []
    top = tuple((token, float(logprobs[token])) for token in best)
    return tuple(Token(token, float(logprobs[token]), top) for token in chosen)
