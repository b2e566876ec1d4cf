"""What one set of weights costs against another, as numbers: both score the same tokens, and their scores are compared.

Pure arithmetic in float64 over logits. Rows come a few at a time, so that no more than a few of [V] are in memory.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twostroke.errors import InvalidRequest, ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """How far a model's scores of a text lie from a reference's. Divergences are in nats a token."""

    tokens: int  # that both scored
    perplexity: float
    reference_perplexity: float
    perplexity_change: float  # perplexity / reference_perplexity - 1
    perplexity_error: float  # standard error of the change, were tokens independent
    kl_mean: float  # Kullback-Leibler divergence of the model from the reference, as are the next two
    kl_p99: float  # the least that 99 of 100 tokens do not exceed
    kl_max: float
    top1: float  # share of tokens for which both find the same one likeliest
    logit: float  # largest difference between their logits of a token


class Tally:
    """Gathers two models' scores of the same tokens."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []  # float64 [R] each, as are the next two: negative log-likelihoods in nats
        self._reference_losses: list[Tensor] = []
        self._divergences: list[Tensor] = []
        self._agreed = 0
        self._logit = 0.0

    def add(self, reference: Tensor, other: Tensor, targets: Tensor) -> None:
        """Compare logits [R, V] of the reference with the other's; targets int64 [R] are the tokens that came.

        Raises:
            ModelError: a logit is not finite.
        """
        told, found = reference.double(), other.double()
        if not (told.isfinite().all() and found.isfinite().all()):
            raise ModelError("logits are not finite: the values of this weight mode are too coarse for the model")
        ours, theirs = told.log_softmax(-1), found.log_softmax(-1)
        self._reference_losses.append(_losses(ours, targets))
        self._losses.append(_losses(theirs, targets))
        self._divergences.append((ours.exp() * (ours - theirs)).sum(-1).clamp_min(0))  # rounding may go below
        self._agreed += int((told.argmax(-1) == found.argmax(-1)).sum())
        self._logit = max(self._logit, float((told - found).abs().max()))

    def cost(self) -> Cost:
        """Sum up.

        Raises:
            InvalidRequest: fewer than two tokens were scored.
            ModelError: the perplexity is beyond float64.
        """
        tokens = sum(map(len, self._losses))
        if tokens < 2:
            raise InvalidRequest("the text is too short: at least two tokens must be scored", field="text")
        losses, references = torch.cat(self._losses), torch.cat(self._reference_losses)
        change, spread = float((losses - references).mean()), float((losses - references).std())
        perplexities = (losses.mean().exp().item(), references.mean().exp().item())
        if not all(map(math.isfinite, perplexities)):
            raise ModelError("the perplexity is beyond any number: the model makes nothing of this text")
        divergences = torch.cat(self._divergences).sort().values
        return Cost(
            tokens=tokens,
            perplexity=perplexities[0],
            reference_perplexity=perplexities[1],
            perplexity_change=math.expm1(change),
            perplexity_error=math.exp(change) * spread / math.sqrt(tokens),
            kl_mean=float(divergences.mean()),
            kl_p99=float(divergences[-(-99 * tokens // 100) - 1]),
            kl_max=float(divergences[-1]),
            top1=self._agreed / tokens,
            logit=self._logit,
        )


@dataclass(frozen=True, slots=True)
class Likeness:
    """How long greedy answers stay those of the reference."""

    alike: tuple[int, ...]  # for each answer, how many of its first tokens are the reference's

    @property
    def median(self) -> float:
        """Half of the answers stay alike for at most this many tokens."""
        return statistics.median(self.alike)

    @property
    def least(self) -> int:
        """No answer stays alike for fewer."""
        return min(self.alike)


def likeness(references: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Likeness:
    """Count each answer's first tokens that equal its reference's."""
    return Likeness(tuple(_alike(*pair) for pair in zip(references, answers, strict=True)))


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = list(zip(one, other, strict=True))
    return next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), len(pairs))


def _losses(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    return -log_probabilities.gather(1, targets.unsqueeze(1)).squeeze(1)
