"""From a step's integers to tensors and back: the only place where scheduling meets the model."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from itertools import compress
from typing import cast

import numpy as np
import torch
from torch import Tensor

from twostroke.engine.batch import Batch, Segment, build_batch
from twostroke.engine.cache import KvCache
from twostroke.engine.cuda.fence import upload
from twostroke.engine.forward import Forward
from twostroke.engine.models import CausalModel
from twostroke.engine.sampler import Draw, sample
from twostroke.engine.sequence import Sequence
from twostroke.engine.step import Chunk, Step
from twostroke.types import Token


class Runner:
    """A model and its pages, driven one step at a time.

    Args:
        model: scores what came out of its layers.
        cache: its pages.
        forward: runs its layers.
    """

    def __init__(self, model: CausalModel, cache: KvCache, forward: Forward) -> None:
        self._model = model
        self._cache = cache
        self._forward = forward

    @torch.inference_mode()
    def prepare(self) -> None:
        """Do before the first step what may take seconds."""
        self._forward.prepare()

    @torch.inference_mode()
    def run(self, step: Step) -> Mapping[Sequence, tuple[Token, ...]]:
        """Make the step's copies, run its chunks in one pass, and sample where one ends its sequence's tokens.

        Returns: the tokens of every sequence, one per choice, none where its chunk does not sample; a sequence with a
            hidden state or logits that are not finite, or that leave no token to choose, is absent.
        """
        for copy in step.copies:
            self._cache.copy_page(copy.source, copy.target)
        batch = build_batch([_segment(chunk) for chunk in step.chunks], self._cache.format.block_tokens)
        hidden = self._forward(batch)
        drawn = self._drawn([chunk.sequence for chunk in step.chunks if chunk.samples], batch, hidden)
        fine = _all_finite(hidden, batch)
        results = ((chunk.sequence, drawn.get(chunk.sequence, ())) for chunk in compress(step.chunks, fine))
        return {sequence: tokens for sequence, tokens in results if tokens is not None}

    def _drawn(
        self, sampling: Items[Sequence], batch: Batch, hidden: Tensor
    ) -> Mapping[Sequence, tuple[Token, ...] | None]:
        if not sampling:
            return {}
        last = hidden[upload(batch.sample_rows, hidden.device)]
        tokens = sample(self._model.logits(last), [_draw(sequence) for sequence in sampling])
        return dict(zip(sampling, tokens, strict=True))


def _all_finite(hidden: Tensor, batch: Batch) -> list[bool]:
    """Whether all hidden states of each segment are finite.

    A token that attends to a key or value that is NaN is NaN itself, so what is finite here wrote finite pages.
    """
    finite = hidden.isfinite().all(dim=1).cpu().numpy()
    return cast("list[bool]", np.logical_and.reduceat(finite, batch.qo_indptr[:-1].numpy()).tolist())


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
