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

_KINDS = {torch.float32: FLOAT, torch.float16: HALF, torch.bfloat16: BFLOAT}
_MOST_ROWS, _MOST_DIM, _LANES = 256, 256, 16  # of one item, as in kernels/paged.h
_ROWS, _ROWS_ON_TILES = 96, 192  # what pays: keys are prepared once for all rows of an item, whose sums stay in cache


def can_attend(shape: AttentionShape) -> bool:
    """Say whether the kernels take heads of this form."""
    group = shape.heads // shape.kv_heads
    return group <= _MOST_ROWS and shape.head_dim <= _MOST_DIM and shape.head_dim % _LANES == 0


@dataclass(frozen=True, slots=True)
class NativePlan:
    """What is the same for all layers of a step; the batch stays alive with it, since the kernels point into it."""

    batch: Batch
    items: Tensor  # int32 [n, 5], as in kernels/paged.h
    described: CAttention
    address: int
    slot_page: int
    slot_offset: int


class NativeAttention:
    """An AttentionBackend over a KvCache in the memory of this process; on `tiles`, chunks keep 16 bits of a number."""

    def __init__(self, cache: KvCache, shape: AttentionShape, library: Library, threads: int, *, tiles: bool) -> None:
        form = cache.format
        self._library, self._threads, self._shape = library, threads, shape
        self._data = cache.data
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
        self._cache_address = ctypes.addressof(self._cache)
        self._group = shape.heads // shape.kv_heads
        self._queries = max(1, (_ROWS_ON_TILES if self._tiles else _ROWS) // self._group)

    def plan(self, batch: Batch) -> NativePlan:
        """Cut the batch into items: one key-value head and a few neighbouring queries of one segment each."""
        items = self._items(batch)
        described = CAttention(
            kv=ctypes.pointer(self._cache),
            qo_indptr=batch.qo_indptr.data_ptr(),
            kv_indptr=batch.kv_indptr.data_ptr(),
            kv_indices=batch.kv_indices.data_ptr(),
            kv_last_page_len=batch.kv_last_page_len.data_ptr(),
            items=items.data_ptr(),
            tiles=self._tiles,
        )
        return NativePlan(
            batch=batch,
            items=items,
            described=described,
            address=ctypes.addressof(described),
            slot_page=batch.slot_page.data_ptr(),
            slot_offset=batch.slot_offset.data_ptr(),
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: NativePlan) -> Tensor:
        """Write k, v [T, Hkv, D] into their pages, then attend q [T, H, D]; returns [T, H, D]."""
        library, tokens, described = self._library, q.shape[0], plan.described
        out = torch.empty(q.shape)
        library.append(
            self._cache_address,
            layer,
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            plan.slot_page,
            plan.slot_offset,
            tokens,
        )
        described.layer = layer
        described.window = self._shape.windows[layer] or 0
        described.q, described.q_stride, described.out = q.data_ptr(), q.stride(0), out.data_ptr()
        library.attend(plan.address, len(plan.items), self._threads)
        return out

    def _items(self, batch: Batch) -> Tensor:
        """One token's heads go together, so that pages are read as they lie, unless there are too few for the threads.

        Of longer segments each head goes by itself: its keys are turned once for many queries.
        """
        counts = np.diff(batch.qo_indptr.numpy())
        singles, chunks = np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)
        heads = self._shape.kv_heads
        together = heads if len(singles) >= 2 * self._threads and heads * self._group <= _MOST_ROWS else 1
        pieces = -(-counts[chunks] // self._queries)
        piece = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        segment, first = np.repeat(chunks, pieces), piece * self._queries
        queries = np.minimum(counts[segment] - first, self._queries)
        items = np.concatenate(
            (
                _for_heads(heads, together, singles, np.zeros_like(singles), np.ones_like(singles)),
                _for_heads(heads, 1, segment, first, queries),
            )
        )
        # The longest first, so that threads end together: work is rows times the tokens that they see.
        pages = np.diff(batch.kv_indptr.numpy())[items[:, 0]]
        return torch.from_numpy(items[np.argsort(-(pages * items[:, 2] * items[:, 4]), kind="stable")])


def _for_heads(heads: int, together: int, segment: Ints, first: Ints, queries: Ints) -> npt.NDArray[np.int32]:
    """Repeat each piece for all key-value heads, `together` of them at a time: rows of NativePlan.items."""
    starts = np.arange(0, heads, together)
    head = np.tile(starts, len(segment))
    columns = (np.repeat(each, len(starts)) for each in (segment, first, queries))
    segment, first, queries = columns
    return np.stack((segment, head, np.full_like(head, together), first, queries), axis=1).astype(np.int32)
