"""Paged attention by torch's scaled_dot_product_attention, for CPUs.

Keys and values are gathered token by token, so that no stale byte of a page ever meets a score: a page's last owner may
have left anything in it, NaN included. Gathering rows of one token costs the same as gathering whole pages.
Heads that share a key-value head read it through a stride of zero; nothing is repeated in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from twostroke.engine.attention import AttentionShape, as_kept
from twostroke.engine.attention.sights import Sight, Table
from twostroke.engine.batch import Batch
from twostroke.engine.cache import KvCache


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """What is the same for all layers of a step, or for all with the same window."""

    gathered: Tensor  # [2, rows of the largest gather, Hkv, D]: every layer's keys and values pass through it
    slots: Tensor  # int64 [T]: token rows that take this step's keys and values, counted within a layer's part
    sights: Mapping[int | None, Sight]  # by window


class TorchAttention:
    """An AttentionBackend over a KvCache in the memory of this process."""

    def __init__(self, cache: KvCache, shape: AttentionShape) -> None:
        form, rows = cache.format, cache.token_rows()
        self._shape = shape
        self._rows = rows
        self._page_rows = form.layers * 2 * form.block_tokens  # token rows from a page to the next
        # Views that begin at each layer's keys, and values, in the first page: one row number serves all layers.
        parts = [rows[part * form.block_tokens :] for part in range(2 * form.layers)]
        self._parts = tuple(zip(parts[::2], parts[1::2], strict=True))

    def plan(self, batch: Batch) -> TorchPlan:
        """Turn pages into token rows and split the batch into decodes and chunks, once for each window."""
        table = Table(batch, self._page_rows)
        longest = max(table.lengths)
        closing = {window: None if window is None or window >= longest else window for window in self._shape.windows}
        sights = {window: table.sight(window) for window in set(closing.values())}
        largest = max(sight.largest for sight in sights.values())
        return TorchPlan(
            gathered=self._rows.new_empty((2, largest, *self._rows.shape[1:])),
            slots=batch.slot_page * self._page_rows + batch.slot_offset,
            sights={window: sights[seen] for window, seen in closing.items()},
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: TorchPlan) -> Tensor:
        """Write k, v [T, Hkv, D] into their pages, then attend q [T, H, D]; returns [T, H, D]."""
        part, scale = self._parts[layer], self._shape.scale
        sight = plan.sights[self._shape.windows[layer]]
        k, v = as_kept(k, self._rows.dtype), as_kept(v, self._rows.dtype)  # attended now as later steps will read them
        part[0].index_copy_(0, plan.slots, k)
        part[1].index_copy_(0, plan.slots, v)
        if len(sight.decodes) == 1 and not sight.chunks:
            return _attend_decodes(q, _gather(part, sight.decodes[0].rows, plan.gathered), sight.decodes[0].mask, scale)
        out = torch.empty_like(q)
        for group in sight.decodes:
            found = _gather(part, group.rows, plan.gathered)
            attended = _attend_decodes(q.index_select(0, group.queries), found, group.mask, scale)
            out.index_copy_(0, group.queries, attended)
        for chunk in sight.chunks:
            span = slice(chunk.first, chunk.last)
            found = (k[span], v[span]) if chunk.rows is None else _gather(part, chunk.rows, plan.gathered)
            out[span] = _attend_chunk(q[span], found, chunk.mask, scale)
        return out


def _gather(part: tuple[Tensor, Tensor], rows: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
    """Copy a layer's tokens out of their pages: two [n, Hkv, D]. Fresh memory would cost three times the copy."""
    keys, values = into[0, : len(rows)], into[1, : len(rows)]
    torch.index_select(part[0], 0, rows, out=keys)
    torch.index_select(part[1], 0, rows, out=values)
    return keys, values


def _attend_decodes(q: Tensor, found: tuple[Tensor, Tensor], mask: Tensor | None, scale: float) -> Tensor:
    """Attend one query a sequence, q [B, H, D] to B times n gathered tokens; a group's heads pose as positions."""
    batch, heads, width = q.shape
    keys, values = (each.view(batch, -1, *each.shape[1:]).transpose(1, 2).to(q.dtype) for each in found)
    folded = q.view(batch, keys.shape[1], -1, width)
    out = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads, width)


def _attend_chunk(q: Tensor, found: tuple[Tensor, Tensor], mask: Tensor | None, scale: float) -> Tensor:
    """Attend q [S, H, D] to keys and values [n, Hkv, D]; without a mask it is causal with S == n."""
    tokens, heads, width = q.shape
    length, kv_heads = found[0].shape[:2]
    grouped = q.view(tokens, kv_heads, -1, width).permute(1, 2, 0, 3)  # [Hkv, group, S, D]
    shape = (kv_heads, grouped.shape[1], length, width)
    keys, values = (each.to(q.dtype).transpose(0, 1).unsqueeze(1).expand(shape) for each in found)
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(tokens, heads, width)
