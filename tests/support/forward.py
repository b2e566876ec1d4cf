"""Runs a loaded model without scheduler or sampler: tokens in, logits out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from twostroke.engine.attention.torch import TorchAttention
from twostroke.engine.batch import Segment, build_batch
from twostroke.engine.cache import KvCache
from twostroke.engine.weights import LoadedModel


def all_logits(loaded: LoadedModel, tokens: Sequence[int], *, chunks: Iterable[int] = ()) -> Tensor:
    """Score every position of `tokens`: float32 [n, vocab].

    `chunks` are the lengths to cut the prompt into; what they leave over runs as one last chunk.
    """
    form = loaded.kv_format()
    needed = -(-len(tokens) // form.block_tokens)
    cache = KvCache(form, needed + 1)
    attention = TorchAttention(cache)
    pages = list(range(needed, 0, -1))
    scored, start = [], 0
    for length in [*chunks, len(tokens)]:
        piece = tokens[start : start + length]
        if piece:
            batch = build_batch([Segment(piece, start, pages, sample=True)], form.block_tokens)
            plan = attention.plan(batch)
            scored.append(loaded.model.logits(loaded.model.forward(batch.token_ids, batch.positions, attention, plan)))
        start += len(piece)
    return torch.cat(scored)
