"""Paged attention by FlashInfer's kernels, which read pages where they lie (arXiv:2501.01005).

Keys and values are appended first; a segment's queries then see all of its pages up to themselves, since the causal
mask is aligned to the last token. So a chunk behind a prefix, a first chunk and a decode are one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from types import ModuleType

import torch
from torch import Tensor

from twostroke.engine.attention import AttentionShape, as_kept
from twostroke.engine.attention.captured import DecodeSlots
from twostroke.engine.attention.wrappers import LAYOUT, PageTable, Wrapper, Wrappers, run
from twostroke.engine.batch import Batch
from twostroke.engine.cache import KvCache
from twostroke.engine.cuda.fence import Fence, fence_on, upload
from twostroke.errors import Internal

MOST_SLOTS = 256  # single tokens of a captured step: beyond it, launching kernels is a small part of a step


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """What is the same for all layers of a step: the page table, and a planned wrapper for each layer's window."""

    table: PageTable
    wrappers: Sequence[Wrapper]  # one a layer


class FlashInferAttention:
    """An AttentionBackend over a KvCache on a CUDA device.

    Page 0 is not zero here: the padded rows of captured steps write their keys to it, and nothing else reads it.

    Args:
        package: FlashInfer.
        cache: the pages.
        shape: of the model's attention.
        dtype: of queries and outputs.
    """

    def __init__(self, package: ModuleType, cache: KvCache, shape: AttentionShape, dtype: torch.dtype) -> None:
        self._package = package
        self._windows = shape.windows
        self.page_tokens = cache.format.block_tokens
        self._dtype = cache.data.dtype
        self._device = cache.data.device
        # Views with a page's stride: every layer is read in place from block-major memory.
        self._layers = tuple((cache.data[:, layer, 0], cache.data[:, layer, 1]) for layer in range(cache.format.layers))
        self._wrappers = Wrappers(
            package,
            shape,
            page_tokens=self.page_tokens,
            queries=dtype,
            cached=self._dtype,
            device=self._device,
            rows=MOST_SLOTS,
        )
        distinct = sorted(set(shape.windows), key=lambda window: window or 0)
        self._prefill = {each: _Turns(self._wrappers.prefill, self._device) for each in distinct}
        self._decode = {each: _Turns(self._wrappers.decode, self._device) for each in distinct}

    def plan(self, batch: Batch) -> FlashInferPlan:
        """Send the page table and let FlashInfer share the work out, once for each distinct window."""
        require_int32(batch)
        table = self._sent(batch)
        planned = {window: self._planned(batch, table.kv_indices, window) for window in self._prefill}
        return FlashInferPlan(table, self._by_layer(planned))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: FlashInferPlan) -> Tensor:
        """Write k, v [T, Hkv, D] into their pages, then attend q [T, H, D]; returns [T, H, D]."""
        table, pages = plan.table, self._layers[layer]
        self._package.append_paged_kv_cache(
            as_kept(k, self._dtype),  # the kernel takes the dtype for granted
            as_kept(v, self._dtype),
            table.batch_indices,
            table.positions,
            pages,
            table.kv_indices,
            table.kv_indptr,
            table.kv_last_page_len,
            kv_layout=LAYOUT,
        )
        return run(plan.wrappers[layer], q, pages)

    def slots(self, first: Batch, *, pages: int) -> tuple[DecodeSlots, FlashInferPlan]:
        """Return tables for captured steps of as many single tokens as `first` has, and the plan that uses them."""
        slots = DecodeSlots(self._wrappers, tuple(self._decode), first, pages=pages)
        return slots, FlashInferPlan(slots.table, self._by_layer(slots.planned))

    def _by_layer(self, planned: Mapping[int | None, Wrapper]) -> tuple[Wrapper, ...]:
        """Return the wrapper of each layer, given one for each distinct window."""
        return tuple(planned[window] for window in self._windows)

    def _planned(self, batch: Batch, indices: Tensor, window: int | None) -> Wrapper:
        if len(batch.token_ids) == len(batch.kv_last_page_len):
            with self._decode[window] as wrapper:
                self._wrappers.plan_decode(wrapper, batch, indices, window)
        else:
            with self._prefill[window] as wrapper:
                self._wrappers.plan_prefill(wrapper, batch, indices, window)
        return wrapper

    def _sent(self, batch: Batch) -> PageTable:
        counts = batch.qo_indptr.diff()
        segments = torch.arange(len(counts), dtype=torch.int32)
        host = (
            segments.repeat_interleave(counts),
            batch.positions.to(torch.int32),
            batch.kv_indptr,
            batch.kv_indices,
            batch.kv_last_page_len,
        )
        return PageTable(*(upload(each, self._device) for each in host))


def require_int32(batch: Batch) -> None:
    """Refuse tables of another type: the kernels would read them as int32 all the same, and corrupt the cache.

    Raises:
        Internal: a table is not int32.
    """
    for table in (batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len):
        if table.dtype != torch.int32:
            raise Internal(f"a page table is {table.dtype}, not int32")


class _Turns:
    """Two wrappers that take turns, each used only once the device has read what its last plan left in pinned memory.

    A plan is written there and copied behind the work that is already queued; the next one would overwrite it.
    """

    def __init__(self, make: Callable[[], Wrapper], device: torch.device) -> None:
        pairs: list[tuple[Wrapper, Fence]] = [(make(), fence_on(device)) for _ in range(2)]
        self._turns = cycle(pairs)
        self._wrapper, self._fence = pairs[0]

    def __enter__(self) -> Wrapper:
        self._wrapper, self._fence = next(self._turns)
        self._fence.synchronize()
        return self._wrapper

    def __exit__(self, *_: object) -> None:
        self._fence.record()
