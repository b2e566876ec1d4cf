"""Paged attention by torch's scaled_dot_product_attention, for CPUs.

Keys and values are gathered token by token, so that no stale byte of a page ever meets a score: a page's last owner may
have left anything in it, NaN included. Gathering rows of one token costs the same as gathering whole pages.
Heads that share a key-value head read it through a stride of zero; nothing is repeated in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from twostroke.engine.batch import Batch
from twostroke.engine.cache import KvCache

_SHORT = 128  # tokens; below this, padding costs less than another kernel call


@dataclass(frozen=True, slots=True)
class _Decodes:
    """B single-token segments of similar length, attended at once."""

    queries: Tensor  # int64 [B]: their rows in the batch
    rows: Tensor  # int64 [B * longest]: token rows, as in TorchPlan.slots, padded with row 0 of the scratch page
    mask: Tensor | None  # float32 [B, 1, 1, longest], 0 or -inf; None when all are equally long


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One segment of several tokens."""

    first: int
    last: int  # queries are rows first to last of the batch, last excluded
    rows: Tensor | None  # int64 [start + S]: token rows, as in TorchPlan.slots; None without a prefix
    mask: Tensor | None  # float32 [S, start + S], 0 or -inf; None without a prefix


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """What is the same for all layers of a step."""

    gathered: Tensor  # [2, rows of the largest gather, Hkv, D]: every layer's keys and values pass through it
    slots: Tensor  # int64 [T]: token rows that take this step's keys and values, counted within a layer's part
    decodes: tuple[_Decodes, ...]
    chunks: tuple[_Chunk, ...]


class TorchAttention:
    """An AttentionBackend over a KvCache in the memory of this process."""

    def __init__(self, cache: KvCache) -> None:
        form, rows = cache.format, cache.token_rows()
        self._rows = rows
        self._page_rows = form.layers * 2 * form.block_tokens  # token rows from a page to the next
        # Views that begin at each layer's keys, and values, in the first page: one row number serves all layers.
        parts = [rows[part * form.block_tokens :] for part in range(2 * form.layers)]
        self._parts = tuple(zip(parts[::2], parts[1::2], strict=True))

    def plan(self, batch: Batch) -> TorchPlan:
        """Turn pages into token rows and split the batch into decodes and chunks."""
        table = _Table(batch, self._page_rows)
        singles = [segment for segment, count in enumerate(table.counts) if count == 1]
        decodes = tuple(table.decodes(group) for group in _by_length(singles, table.lengths))
        chunks = tuple(table.chunk(segment) for segment, count in enumerate(table.counts) if count > 1)
        gathers = [group.rows for group in decodes] + [chunk.rows for chunk in chunks if chunk.rows is not None]
        largest = max((len(rows) for rows in gathers), default=0)
        return TorchPlan(
            gathered=self._rows.new_empty((2, largest, *self._rows.shape[1:])),
            slots=batch.slot_page * self._page_rows + batch.slot_offset,
            decodes=decodes,
            chunks=chunks,
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: TorchPlan) -> Tensor:
        """Write k, v [T, Hkv, D] into their pages, then attend q [T, H, D]; returns [T, H, D]."""
        part = self._parts[layer]
        k, v = k.to(self._rows.dtype), v.to(self._rows.dtype)  # what is attended now is what later steps will read
        part[0].index_copy_(0, plan.slots, k)
        part[1].index_copy_(0, plan.slots, v)
        if len(plan.decodes) == 1 and not plan.chunks:
            return _attend_decodes(q, _gather(part, plan.decodes[0].rows, plan.gathered), plan.decodes[0].mask)
        out = torch.empty_like(q)
        for group in plan.decodes:
            found = _gather(part, group.rows, plan.gathered)
            out.index_copy_(0, group.queries, _attend_decodes(q.index_select(0, group.queries), found, group.mask))
        for chunk in plan.chunks:
            span = slice(chunk.first, chunk.last)
            found = (k[span], v[span]) if chunk.rows is None else _gather(part, chunk.rows, plan.gathered)
            out[span] = _attend_chunk(q[span], found, chunk.mask)
        return out


def _gather(part: tuple[Tensor, Tensor], rows: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
    """Copy a layer's tokens out of their pages: two [n, Hkv, D]. Fresh memory would cost three times the copy."""
    keys, values = into[0, : len(rows)], into[1, : len(rows)]
    torch.index_select(part[0], 0, rows, out=keys)
    torch.index_select(part[1], 0, rows, out=values)
    return keys, values


def _attend_decodes(q: Tensor, found: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
    """Attend one query a sequence, q [B, H, D] to B times n gathered tokens; a group's heads pose as positions."""
    batch, heads, width = q.shape
    keys, values = (each.view(batch, -1, *each.shape[1:]).transpose(1, 2).to(q.dtype) for each in found)
    folded = q.view(batch, keys.shape[1], -1, width)
    return scaled_dot_product_attention(folded, keys, values, attn_mask=mask).reshape(batch, heads, width)


def _attend_chunk(q: Tensor, found: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
    """Attend q [S, H, D] to keys and values [n, Hkv, D]; without a mask it is causal with S == n."""
    tokens, heads, width = q.shape
    length, kv_heads = found[0].shape[:2]
    grouped = q.view(tokens, kv_heads, -1, width).permute(1, 2, 0, 3)  # [Hkv, group, S, D]
    shape = (kv_heads, grouped.shape[1], length, width)
    keys, values = (each.to(q.dtype).transpose(0, 1).unsqueeze(1).expand(shape) for each in found)
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, is_causal=mask is None)
    return out.permute(2, 0, 1, 3).reshape(tokens, heads, width)


def _by_length(segments: list[int], lengths: list[int]) -> list[list[int]]:
    """Group segments so that padding at most doubles what is read; short ones always share a group."""
    groups: list[list[int]] = []
    for segment in sorted(segments, key=lambda each: -lengths[each]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and (2 * lengths[segment] >= longest or longest <= _SHORT):
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return [sorted(group) for group in groups]


class _Table:
    """The batch's page table as plain arrays, and the index tensors made from it."""

    def __init__(self, batch: Batch, page_rows: int) -> None:
        self._firsts = batch.qo_indptr.tolist()
        self._page_starts = batch.kv_indices.numpy().astype(np.int64) * page_rows
        self._page_tokens = batch.page_tokens
        self._kv_indptr = batch.kv_indptr.tolist()
        self.counts = batch.qo_indptr.diff().tolist()
        full = (batch.kv_indptr.diff() - 1) * batch.page_tokens
        self.lengths: list[int] = (full + batch.kv_last_page_len).tolist()

    def _rows(self, segment: int) -> Tensor:
        """Return the token rows of a segment's keys, oldest first: int64 [length]."""
        starts = self._page_starts[self._kv_indptr[segment] : self._kv_indptr[segment + 1]]
        rows = (starts[:, None] + np.arange(self._page_tokens)).reshape(-1)
        return torch.from_numpy(rows[: self.lengths[segment]])

    def decodes(self, segments: list[int]) -> _Decodes:
        lengths = [self.lengths[segment] for segment in segments]
        longest = max(lengths)
        rows = torch.zeros((len(segments), longest), dtype=torch.int64)
        for at, segment in enumerate(segments):
            rows[at, : lengths[at]] = self._rows(segment)
        beyond = torch.arange(longest) >= torch.tensor(lengths).unsqueeze(1)
        mask = torch.zeros(beyond.shape).masked_fill_(beyond, float("-inf"))[:, None, None]
        queries = torch.tensor([self._firsts[segment] for segment in segments])
        return _Decodes(queries, rows.view(-1), None if min(lengths) == longest else mask)

    def chunk(self, segment: int) -> _Chunk:
        first, count, length = self._firsts[segment], self.counts[segment], self.lengths[segment]
        if length == count:
            return _Chunk(first, first + count, None, None)
        hidden = torch.ones((count, length), dtype=torch.bool).triu_(length - count + 1)
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        return _Chunk(first, first + count, self._rows(segment), mask)
