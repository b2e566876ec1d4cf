"""Runs a loaded model without scheduler or sampler: tokens in, logits out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from twostroke.engine.batch import Segment, build_batch
from twostroke.engine.cache import KvCache
from twostroke.engine.forward import EagerForward
from twostroke.engine.mode import KvMode
from twostroke.engine.weights import LoadedModel


def all_logits(
    loaded: LoadedModel, tokens: Sequence[int], *, chunks: Iterable[int] = (), kv: KvMode | None = None
) -> Tensor:
    """Score every position of `tokens`: float32 [n, vocab].

    `chunks` are the lengths to cut the prompt into; what they leave over runs as one last chunk. Keys and values keep
    all bits unless `kv` says otherwise, or activations have fewer.
    """
    backend = loaded.model.backend
    exact = KvMode.F32 if backend.dtype == torch.float32 else KvMode.AUTO
    form = loaded.kv_format(kv=kv or exact)
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
