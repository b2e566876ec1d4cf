"""Gumbel-max over many draws at once: the token with the highest noisy score wins its draw.

Noise for a whole vocabulary costs two logarithms a token. Nearly all of them are spared: a bound that needs none tells
which tokens may win, and only these get their noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twostroke.engine.gaps import Gaps
from twostroke.engine.noise import exceedance, gumbel, steps

_SLACK = 2.0**-10  # far above what the float32 roundings of a bound come to


@dataclass(frozen=True, slots=True)
class Contest:
    """P tokens to be drawn.

    Attributes:
        gaps: of the P draws.
        likeliest: the token without a gap, int64 [P].
        temperatures: above 0, float64 [P].
        keys: words of the noise streams, int64 [P].
    """

    gaps: Gaps
    likeliest: Tensor
    temperatures: Tensor
    keys: Tensor

    def contenders(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Every token that may win one of these draws, among few others: draws and ids, int64 [n] each.

        Noise is -log(-log(u)), and -log(u) is at least 1 - u. So score + noise reaches what the likeliest token does,
        whose score is 0, only if exp(score - the noise of the likeliest) is at least 1 - u.
        """
        vocabulary = steps(torch.arange(self.gaps.vocabulary, device=draws.device))
        # Rounding a tiny temperature up only lets more tokens in; in float32 it would round to 0.
        temperatures = self.temperatures.to(torch.float32).clamp_(min=torch.finfo(torch.float32).tiny)
        ahead = gumbel(self.keys, self.likeliest).neg_().add_(_SLACK).to(torch.float32)
        found = []
        for part, gaps in self.gaps.parts(draws):
            chances = gaps.div_(-temperatures[part, None]).add_(ahead[part, None]).exp_()
            places, ids = (chances >= exceedance(self.keys[part, None], vocabulary)).nonzero(as_tuple=True)
            found.append((part[places], ids))
        return torch.cat([each for each, _ in found]), torch.cat([ids for _, ids in found])

    def winners(self, draws: Tensor, ids: Tensor) -> Tensor:
        """The winner of each draw among the listed tokens, the lower id of equals: int64 [P].

        A draw for which none is listed, since its row is not finite, gets the last id.
        """
        last = self.gaps.vocabulary - 1
        noisy = self._noisy(draws, ids)
        best = torch.full_like(self.temperatures, -torch.inf).scatter_reduce_(0, draws, noisy, "amax")
        best_ids = ids.masked_fill(noisy < best[draws], last)
        return torch.full_like(self.likeliest, last).scatter_reduce_(0, draws, best_ids, "amin")

    def _noisy(self, draws: Tensor, ids: Tensor) -> Tensor:
        """Scores plus noise in float64, where the smallest temperature neither overflows nor turns 0 / 0."""
        scores = self.gaps.at(draws, ids).to(torch.float64).neg_().div_(self.temperatures[draws])
        return gumbel(self.keys[draws], ids).add_(scores)
