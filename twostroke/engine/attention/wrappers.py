"""FlashInfer's paged attention, with every option that we give it in one place.

A wrapper is planned once a step and run once a layer. Both phases use the FA2 prefill kernels: for decodes they run on
tensor cores, take any number of heads a group, and need no second module to be compiled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from twostroke.engine.attention import AttentionShape
from twostroke.engine.batch import Batch

BACKEND, LAYOUT = "fa2", "NHD"
Wrapper = Any  # BatchPrefillWithPagedKVCacheWrapper or BatchDecodeWithPagedKVCacheWrapper

_LEAST_WORKSPACE = 128 << 20  # what FlashInfer's documentation recommends
_SPARE = 1.25  # over the formula, which is read off the 0.6.8 scheduler and not promised by it
_LARGEST_TILE, _WIDE = 128, 256  # queries; a head this wide halves the largest
_EVERYTHING = -1  # FlashInfer's word for no window


@dataclass(frozen=True, slots=True)
class PageTable:
    """One step's tables in the device's memory, all int32 and contiguous; names as in Batch."""

    batch_indices: Tensor  # [T]: which segment each token belongs to
    positions: Tensor  # [T]
    kv_indptr: Tensor  # [B + 1]
    kv_indices: Tensor  # [kv_indptr[-1]], or longer in a captured step
    kv_last_page_len: Tensor  # [B]


class Wrappers:
    """Makes and plans wrappers for one model's heads over one cache.

    Args:
        package: FlashInfer.
        shape: of the model's attention.
        page_tokens: tokens of a page.
        queries: dtype of queries and outputs.
        cached: dtype of keys and values.
        device: where they are.
        rows: most segments of a captured step.
    """

    def __init__(
        self,
        package: ModuleType,
        shape: AttentionShape,
        *,
        page_tokens: int,
        queries: torch.dtype,
        cached: torch.dtype,
        device: torch.device,
        rows: int,
    ) -> None:
        self.package, self.device = package, device
        # One for all, since they run one after the other on one stream. Kernels count in it from zero.
        self._workspace = torch.zeros(workspace_bytes(shape, device, rows), dtype=torch.uint8, device=device)
        self._heads = {"num_qo_heads": shape.heads, "num_kv_heads": shape.kv_heads, "page_size": page_tokens}
        self._width = shape.head_dim
        self._numbers = {
            "sm_scale": shape.scale,
            "q_data_type": queries,
            "kv_data_type": cached,
            "o_data_type": queries,
            "non_blocking": True,
        }

    def prefill(self) -> Wrapper:
        """Make a wrapper for segments of any length."""
        return self.package.BatchPrefillWithPagedKVCacheWrapper(self._workspace, LAYOUT, backend=BACKEND)

    def decode(self) -> Wrapper:
        """Make a wrapper for segments of one token."""
        return self.package.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, LAYOUT, use_tensor_cores=True, backend=BACKEND
        )

    def captured_decode(self, table: PageTable) -> Wrapper:
        """Make a wrapper for steps of always the same number of single tokens, whose tables stay where they are."""
        return self.package.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=True,
            backend=BACKEND,
            paged_kv_indptr_buffer=table.kv_indptr,
            paged_kv_indices_buffer=table.kv_indices,
            paged_kv_last_page_len_buffer=table.kv_last_page_len,
        )

    def plan_prefill(self, wrapper: Wrapper, batch: Batch, indices: Tensor, window: int | None) -> None:
        """Plan a step; `indices` are the batch's kv_indices on the device, the rest is read on the host."""
        wrapper.plan(
            batch.qo_indptr,
            batch.kv_indptr,
            indices,
            batch.kv_last_page_len,
            head_dim_qk=self._width,
            causal=True,
            window_left=_left(window),
            # Otherwise FlashInfer looks for it by a loop over tensors.
            max_token_per_sequence=int(batch.qo_indptr.diff().max()),
            **self._heads,
            **self._numbers,
        )

    def plan_decode(self, wrapper: Wrapper, batch: Batch, indices: Tensor, window: int | None) -> None:
        """Plan a step of single tokens, as `plan_prefill` does."""
        wrapper.plan(
            batch.kv_indptr,
            indices,
            batch.kv_last_page_len,
            head_dim=self._width,
            window_left=_left(window),
            **self._heads,
            **self._numbers,
        )

    def replan_decode(self, wrapper: Wrapper, batch: Batch, table: PageTable, window: int | None) -> None:
        """Plan a captured wrapper again, after `table` was filled with the batch: no loops, no copies, no waiting."""
        told = {name: value for name, value in self._numbers.items() if name != "o_data_type"}  # kept from the first
        self.package.decode.fast_decode_plan(
            wrapper,
            table.kv_indptr,
            table.kv_indices[: len(batch.kv_indices)],
            batch.kv_last_page_len,
            head_dim=self._width,
            window_left=_left(window),
            global_override_indptr_cpu=batch.kv_indptr,
            **self._heads,
            **told,
        )


def run(wrapper: Wrapper, q: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
    """Attend q [T, H, D] to a layer's pages; returns [T, H, D], contiguous."""
    out = q.new_empty(q.shape)  # FlashInfer's own would be filled with zeros first, layer by layer
    wrapper.run(q, pages, out=out, enable_pdl=False)
    return out


def workspace_bytes(shape: AttentionShape, device: torch.device, rows: int) -> int:
    """Bytes for the partial results of split sequences: float32 sums and weights, a tile of queries each.

    Source: PrefillSplitQOKVIndptr and FA2DetermineCtaTileQ in FlashInfer 0.6.8, scheduler.cuh and utils.cuh.
    """
    if device.type != "cuda":
        return 1
    group = shape.heads // shape.kv_heads
    blocks = 2 * torch.cuda.get_device_properties(device).multi_processor_count // shape.kv_heads
    captured = math.ceil(rows * group / _tile(group, shape.head_dim)) + rows - 1
    queries = max(blocks * _tile(_LARGEST_TILE, shape.head_dim), captured * _tile(group, shape.head_dim))
    return max(_LEAST_WORKSPACE, math.ceil(_SPARE * shape.heads * queries * (shape.head_dim + 1) * 4))


def _tile(queries: int, head_dim: int) -> int:
    """Return how many queries, those of a group counted each, a block of threads takes at once."""
    if queries > 64 and head_dim < _WIDE:
        return _LARGEST_TILE
    return 64 if queries > 16 else 16


def _left(window: int | None) -> int:
    """Tokens before a query that it sees, as FlashInfer counts them: without the query's own."""
    return _EVERYTHING if window is None else window - 1
