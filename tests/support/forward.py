"""Runs a loaded model without scheduler or sampler: tokens in, logits out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from twostroke.engine.batch import Segment, build_batch
from twostroke.engine.cache import KvCache, kv_dtype
from twostroke.engine.forward import EagerForward
from twostroke.engine.weights import LoadedModel


def all_logits(loaded: LoadedModel, tokens: Sequence[int], *, chunks: Iterable[int] = ()) -> Tensor:
    """Score every position of `tokens`: float32 [n, vocab].

    `chunks` are the lengths to cut the prompt into; what they leave over runs as one last chunk.
    """
    backend = loaded.model.backend
    form = loaded.kv_format(dtype=kv_dtype(backend.dtype))
    needed = -(-len(tokens) // form.block_tokens)
    cache = KvCache(form, needed + 1, backend.device)
    forward = EagerForward(loaded.model, backend.attention(cache, loaded.config.attention))
    pages = list(range(needed, 0, -1))
    scored, start = [], 0
    for length in [*chunks, len(tokens)]:
        piece = tokens[start : start + length]
        if piece:
            batch = build_batch([Segment(piece, start, pages, sample=True)], form.block_tokens)
            scored.append(loaded.model.logits(forward(batch)).cpu())
        start += len(piece)
    return torch.cat(scored)
