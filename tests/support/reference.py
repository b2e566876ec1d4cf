"""Scores for tokens that something else chose: one model in one pass, with no service, scheduler or sampler."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twostroke.engine.batch import Segment, build_batch
from twostroke.engine.cache import KvCache
from twostroke.engine.mode import KvMode
from twostroke.engine.models import forward
from twostroke.engine.noise import gumbel, stream_key
from twostroke.engine.weights import LoadedModel
from twostroke.types import SamplingParams


class Reference:
    """Reads a prompt once, then any number of answers to it."""

    def __init__(self, loaded: LoadedModel, prompt: Sequence[int], *, room: int) -> None:
        """Read `prompt`; `room` is the most tokens of an answer."""
        form = loaded.kv_format(kv=KvMode.F32)
        pages = -(-(len(prompt) + room) // form.block_tokens)
        self._model = loaded.model
        self._block_tokens = form.block_tokens
        self._pages = range(1, pages + 1)
        self._attention = loaded.model.backend.attention(KvCache(form, pages + 1), loaded.config.attention)
        self._read = len(prompt)
        self._last = self._hidden(prompt, 0)[-1:]

    @torch.inference_mode()
    def scores(self, answer: Sequence[int], sampling: SamplingParams) -> Tensor:
        """What the choice of each token of an answer maximizes, float64 [n, V]; row i is computed after answer[:i].

        Logits, with the noise of the first choice added where there is a temperature; no other parameter counts.
        """
        hidden = self._last
        if len(answer) > 1:
            hidden = torch.cat([hidden, self._hidden(answer[:-1], self._read)])
        scores = self._model.logits(hidden).to(torch.float64)
        ids = torch.arange(scores.shape[1])
        for at, row in enumerate(scores):
            row += sampling.temperature * gumbel(stream_key(sampling.seed, 0, self._read + at), ids)
        return scores

    @torch.inference_mode()
    def _hidden(self, tokens: Sequence[int], start: int) -> Tensor:
        batch = build_batch([Segment(tokens, start, self._pages, sample=True)], self._block_tokens)
        return forward(self._model, batch.token_ids, batch.positions, self._attention, self._attention.plan(batch))
