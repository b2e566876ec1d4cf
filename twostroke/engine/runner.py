"""From a step's integers to tensors and back: the only place where scheduling meets the model."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from twostroke.engine.attention import AttentionBackend
from twostroke.engine.batch import Segment, build_batch
from twostroke.engine.cache import KvCache
from twostroke.engine.model import CausalModel
from twostroke.engine.sampler import Draw, sample
from twostroke.engine.sequence import Sequence
from twostroke.engine.step import Chunk, Step
from twostroke.types import Token


class Runner:
    """A model, its pages and its attention, driven one step at a time."""

    def __init__(self, model: CausalModel, cache: KvCache, attention: AttentionBackend) -> None:
        self._model = model
        self._cache = cache
        self._attention = attention

    @torch.inference_mode()
    def run(self, step: Step) -> Mapping[Sequence, tuple[Token, ...]]:
        """Make the step's copies, run its chunks in one pass, and sample where one ends its sequence's tokens.

        Returns: the tokens of every chunk that samples, one per choice; a sequence whose logits are not finite, or
            leave no token to choose, is absent.
        """
        for copy in step.copies:
            self._cache.copy_page(copy.source, copy.target)
        batch = build_batch([_segment(chunk) for chunk in step.chunks], self._cache.format.block_tokens)
        hidden = self._model.forward(batch.token_ids, batch.positions, self._attention, self._attention.plan(batch))
        sampling = [chunk.sequence for chunk in step.chunks if chunk.samples]
        if not sampling:
            return {}
        tokens = sample(self._model.logits(hidden[batch.sample_rows]), [_draw(sequence) for sequence in sampling])
        return {sequence: drawn for sequence, drawn in zip(sampling, tokens, strict=True) if drawn is not None}


def _segment(chunk: Chunk) -> Segment:
    sequence, end = chunk.sequence, chunk.start + chunk.count
    return Segment(sequence.tokens[chunk.start : end], chunk.start, sequence.pages, chunk.samples)


def _draw(sequence: Sequence) -> Draw:
    request = sequence.request
    return Draw(
        params=request.sampling,
        position=len(sequence.tokens),
        choices=request.choices,
        history=sequence.history,
        banned=sequence.banned,
    )
