"""Paged attention by our own kernels: every page is read where it lies, once for all heads that share it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.engine.attention import AttentionShape
from twostroke.engine.batch import Batch
from twostroke.engine.cache import KvCache
from twostroke.engine.native.library import BFLOAT, FLOAT, HALF, CAttention, CCache, Library

Ints = npt.NDArray[np.int64]
Items = npt.NDArray[np.int32]

_KINDS = {torch.float32: FLOAT, torch.float16: HALF, torch.bfloat16: BFLOAT}
_MOST_ROWS, _MOST_DIM, _LANES = 256, 256, 16  # of one item, as in kernels/paged.h
_SPAN = 256  # tokens of a part of a cut context, as in kernels/paged.h
_ROWS, _ROWS_ON_TILES = 96, 192  # what pays: keys are prepared once for all rows of an item, whose sums stay in cache


def can_attend(shape: AttentionShape) -> bool:
    """Say whether the kernels take heads of this form."""
    group = shape.heads // shape.kv_heads
    return group <= _MOST_ROWS and shape.head_dim <= _MOST_DIM and shape.head_dim % _LANES == 0


@dataclass(frozen=True, slots=True)
class NativePlan:
    """What is the same for all layers of a step, as the kernels see it, and the memory that they see it in."""

    described: CAttention
    batch: Batch
    items: Tensor  # int32 [n, 7], as in kernels/paged.h
    merges: Tensor  # int32 [m, 5]
    partial: Tensor  # float32, what the parts of a cut context leave


class NativeAttention:
    """An AttentionBackend over a KvCache in the memory of this process; on `tiles`, chunks keep 16 bits of a number."""

    def __init__(self, cache: KvCache, shape: AttentionShape, library: Library, threads: int, *, tiles: bool) -> None:
        form = cache.format
        self.library, self._threads, self._shape = library, threads, shape
        self._data = cache.data
        self.page_tokens = form.block_tokens
        self._tiles = tiles
        self._cache = CCache(
            pages=cache.data.data_ptr(),
            page_bytes=form.block_bytes,
            page_tokens=form.block_tokens,
            kv_heads=shape.kv_heads,
            group=shape.heads // shape.kv_heads,
            head_dim=shape.head_dim,
            kind=_KINDS[cache.data.dtype],
            scale=shape.scale,
        )
        self._group = shape.heads // shape.kv_heads
        # Key-value heads of an item of one token.
        self._together = shape.kv_heads if shape.heads <= _MOST_ROWS else 1
        self._queries = max(1, (_ROWS_ON_TILES if self._tiles else _ROWS) // self._group)

    def plan(self, batch: Batch) -> NativePlan:
        """Cut the batch into items: one key-value head and a few neighbouring queries of one segment each."""
        cut, joined, slots = self._cut(batch)
        items, merges = torch.from_numpy(cut), torch.from_numpy(joined)
        partial = torch.empty(slots * self._together * self._group * (self._shape.head_dim + 2))
        described = CAttention(
            kv=ctypes.pointer(self._cache),
            slot_page=batch.slot_page.data_ptr(),
            slot_offset=batch.slot_offset.data_ptr(),
            qo_indptr=batch.qo_indptr.data_ptr(),
            kv_indptr=batch.kv_indptr.data_ptr(),
            kv_indices=batch.kv_indices.data_ptr(),
            kv_last_page_len=batch.kv_last_page_len.data_ptr(),
            items=items.data_ptr(),
            merges=merges.data_ptr(),
            item_count=len(items),
            merge_count=len(merges),
            partial=partial.data_ptr(),
            tiles=self._tiles,
        )
        return NativePlan(described, batch, items, merges, partial)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: NativePlan) -> Tensor:
        """Write k, v [T, Hkv, D] into their pages, then attend q [T, H, D]; returns [T, H, D]."""
        out, step = torch.empty(q.shape), ctypes.addressof(plan.described)
        window = self._shape.windows[layer] or 0
        self.library.append(step, layer, k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), q.shape[0])
        self.library.attend(step, layer, window, q.data_ptr(), q.stride(0), out.data_ptr(), self._threads)
        return out

    def _cut(self, batch: Batch) -> tuple[Items, Items, int]:
        """Return items, merges, and how many slots the partial results need."""
        counts = np.diff(batch.qo_indptr.numpy())
        pages = np.diff(batch.kv_indptr.numpy())
        lengths = (pages - 1) * self._cache.page_tokens + batch.kv_last_page_len.numpy()
        items, merges = self._singles(np.flatnonzero(counts == 1), lengths, batch.qo_indptr.numpy())
        slots = len(items) if len(merges) else 0
        items = np.concatenate((items, self._chunks(np.flatnonzero(counts > 1), counts)))
        # The longest first, so that threads end together: work is rows times the tokens that they see.
        seen = np.where(items[:, 6] < 0, lengths[items[:, 0]], _SPAN)
        return items[np.argsort(-(seen * items[:, 2] * items[:, 4]), kind="stable")], merges, slots

    def _singles(self, segments: Ints, lengths: Ints, starts: Ints) -> tuple[Items, Items]:
        """Cut segments of one token: their heads go together, so that pages are read as they lie.

        A long context is cut so that threads share it; where does not depend on how many there are.
        """
        cuts = -(-lengths[segments] // _SPAN)
        items = _for_heads(
            np.arange(0, self._shape.kv_heads, self._together),
            np.repeat(segments, cuts),
            self._together,
            token=_within(cuts) * _SPAN,
        )
        is_part = np.tile(np.repeat(cuts > 1, cuts), self._shape.kv_heads // self._together)
        items[:, 6] = np.where(is_part, np.arange(len(items)), -1)
        segment, head, heads, _, _, _, slot = items[is_part & (items[:, 5] == 0)].T
        merges = np.stack((starts[segment], head, heads, slot, -(-lengths[segment] // _SPAN)), axis=1)
        return items, merges.astype(np.int32)

    def _chunks(self, segments: Ints, counts: Ints) -> Items:
        """Cut longer segments: each head goes by itself, since its keys are prepared once for many queries."""
        pieces = -(-counts[segments] // self._queries)
        segment, first = np.repeat(segments, pieces), _within(pieces) * self._queries
        queries = np.minimum(counts[segment] - first, self._queries)
        return _for_heads(np.arange(self._shape.kv_heads), segment, 1, first=first, queries=queries)


def _within(counts: Ints) -> Ints:
    """Number what is repeated: 0, 1, ... for each of `counts`."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _for_heads(
    heads: Ints,
    segment: Ints,
    together: int,
    *,
    first: Ints | int = 0,
    queries: Ints | int = 1,
    token: Ints | int = 0,
) -> Items:
    """Repeat each piece for all `heads`, `together` at a time: rows of NativePlan.items, none of them a part."""
    rows = np.empty((len(heads), len(segment), 7), dtype=np.int32)
    for column, values in enumerate((segment, heads[:, None], together, first, queries, token, -1)):
        rows[:, :, column] = values
    return rows.reshape(-1, 7)
