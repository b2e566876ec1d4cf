"""The judge: paged attention one query at a time, in float64, by the textbook. Slow on purpose."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twostroke.engine.attention import AttentionShape
from twostroke.engine.batch import Batch
from twostroke.engine.cache import KvCache


class ReferenceAttention:
    """softmax(scale q k) v over what each query sees of its sequence; no batching, no kernels (arXiv:1706.03762)."""

    def __init__(self, cache: KvCache, shape: AttentionShape) -> None:
        self._cache, self._shape = cache, shape

    def plan(self, batch: Batch) -> Batch:
        """Return the batch itself: there is nothing to prepare."""
        return batch

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Batch) -> Tensor:
        """Write k, v into their pages, then attend every query to its own past; q's dtype is returned."""
        pages, offsets = plan.slot_page.tolist(), plan.slot_offset.tolist()
        for row, (page, offset) in enumerate(zip(pages, offsets, strict=True)):
            self._cache.data[page, layer, 0, offset] = k[row].to(self._cache.data.dtype)
            self._cache.data[page, layer, 1, offset] = v[row].to(self._cache.data.dtype)
        out, scale = torch.empty_like(q), self._shape.scale
        for row, view in enumerate(_views(plan)):
            keys, values = (self._read(layer, part, view) for part in (0, 1))
            out[row] = _attend_one(q[row].double() * scale, keys, values).to(q.dtype)
        return out

    def _read(self, layer: int, part: int, view: _View) -> Tensor:
        window = self._shape.windows[layer]
        oldest = 0 if window is None else max(0, view.length - window)
        paged = [self._cache.data[page, layer, part] for page in view.pages]
        return torch.cat(paged)[oldest : view.length].double()


@dataclass(frozen=True, slots=True)
class _View:
    """What one query may see, if no window forbids it: the first `length` tokens in `pages`."""

    pages: list[int]
    length: int


def _views(batch: Batch) -> list[_View]:
    starts, ends = batch.kv_indptr[:-1].tolist(), batch.kv_indptr[1:].tolist()
    counts = batch.qo_indptr.diff().tolist()
    pages = [batch.kv_indices[start:end].tolist() for start, end in zip(starts, ends, strict=True)]
    owner = [segment for segment, count in enumerate(counts) for _ in range(count)]
    return [_View(pages[owner[row]], position + 1) for row, position in enumerate(batch.positions.tolist())]


def _attend_one(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend one scaled query [H, D] to keys and values [n, Hkv, D]; head h reads key-value head h // (H / Hkv)."""
    group = query.shape[0] // keys.shape[1]
    out = torch.empty_like(query)
    for head in range(query.shape[0]):
        scores = keys[:, head // group] @ query[head]
        out[head] = scores.softmax(dim=0) @ values[:, head // group]
    return out
