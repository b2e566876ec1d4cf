"""Caches with a past, the steps that follow on it, and what attention over them is in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu.shapes import Heads, kv_format
from twostroke.engine.attention import AttentionShape
from twostroke.engine.batch import Batch, Segment, build_batch
from twostroke.engine.cache import KvCache


@dataclass(frozen=True, slots=True)
class Scene:
    """A step: (prefix, new tokens) of each sequence, whose pages are shuffled. What no token wrote is NaN."""

    cache: KvCache
    batch: Batch
    q: Tensor  # [T, H, D], as the other two a view of one tensor
    k: Tensor  # [T, Hkv, D]
    v: Tensor
    spans: Sequence[tuple[int, int]]
    pages: Sequence[Tensor]  # int64, of each sequence


def scene(
    heads: Heads, spans: Sequence[tuple[int, int]], device: torch.device, *, layers: int = 1, block_tokens: int = 16
) -> Scene:
    """Make random keys and values for every prefix, and random queries, keys and values for the new tokens."""
    form = kv_format(heads, layers=layers, block_tokens=block_tokens)
    counts = [-(-(prefix + new) // block_tokens) for prefix, new in spans]
    pages = torch.split(torch.randperm(sum(counts)) + 1, counts)
    cache = KvCache(form, sum(counts) + 1, device)
    cache.data[1:] = float("nan")
    for (prefix, _), mine in zip(spans, pages, strict=True):
        full, rest = divmod(prefix, block_tokens)
        at = mine.to(device)
        for start in range(0, full, 512):  # a few at a time: random numbers are float32 first
            some = at[start : min(full, start + 512)]
            cache.data[some] = torch.randn((len(some), *form.block_shape), device=device).to(cache.data.dtype)
        if rest:
            last = torch.randn((layers, 2, rest, heads.kv_heads, heads.head_dim), device=device)
            cache.data[int(mine[full]), :, :, :rest] = last.to(cache.data.dtype)
    segments = [
        Segment(range(new), prefix, mine.tolist(), sample=True)
        for (prefix, new), mine in zip(spans, pages, strict=True)
    ]
    tokens = sum(new for _, new in spans)
    fused = torch.randn((tokens, heads.heads + 2 * heads.kv_heads, heads.head_dim), device=device)
    q, k, v = torch.split(fused.to(cache.data.dtype), [heads.heads, heads.kv_heads, heads.kv_heads], dim=1)
    return Scene(cache, build_batch(segments, block_tokens), q, k, v, spans, pages)


def expected(step: Scene, shape: AttentionShape, layer: int) -> Tensor:
    """Attend in float64 to what the pages hold once the step's keys and values are in them; [T, H, D]."""
    group, window = shape.heads // shape.kv_heads, shape.windows[layer]
    found, first = [], 0
    for (prefix, new), pages in zip(step.spans, step.pages, strict=True):
        paged = step.cache.data[pages.to(step.cache.device), layer]  # [n, 2, P, Hkv, D]
        keys, values = (paged[:, part].flatten(0, 1)[: prefix + new].double() for part in (0, 1))
        q = step.q[first : first + new].double().reshape(new, shape.kv_heads, group, -1) * shape.scale
        ages = torch.arange(prefix, prefix + new, device=keys.device)[:, None] - torch.arange(
            prefix + new, device=keys.device
        )
        hidden = ages < 0 if window is None else (ages < 0) | (ages >= window)
        scores = torch.einsum("skgd,nkd->kgsn", q, keys).masked_fill_(hidden, float("-inf"))
        found.append(torch.einsum("kgsn,nkd->skgd", scores.softmax(dim=-1), values).flatten(1, 2))
        first += new
    return torch.cat(found)


def written(step: Scene, layer: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of the step's tokens as the pages hold them."""
    device = step.cache.device
    pages, offsets = step.batch.slot_page.to(device), step.batch.slot_offset.to(device)
    return step.cache.data[pages, layer, 0, offsets], step.cache.data[pages, layer, 1, offsets]


def relative_error(found: Tensor, right: Tensor) -> float:
    """The length of the error over that of what is right; NaN where anything is."""
    return float((found.double() - right.double()).norm() / right.double().norm())
