"""One step's work as flat arrays: which tokens run, where their keys go, and which pages each sequence reads.

The layout is compressed rows (CSR), and names follow FlashInfer's so that a GPU backend takes a batch unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.errors import Internal


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of consecutive tokens of one sequence; one token is a decode, more are a chunk of its prompt."""

    tokens: Sequence[int]
    start: int  # position of tokens[0]; everything before it is in the pages already
    pages: Sequence[int]  # the sequence's pages, in order; they cover start + len(tokens), more are not looked at
    sample: bool  # whether the last token's logits are wanted


@dataclass(frozen=True, slots=True)
class Batch:
    """B segments of T tokens in all; R of them sample."""

    page_tokens: int
    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    qo_indptr: Tensor  # int32 [B + 1]; segment i is tokens qo_indptr[i] to qo_indptr[i + 1]
    kv_indptr: Tensor  # int32 [B + 1]; its pages are kv_indices[kv_indptr[i] : kv_indptr[i + 1]]
    kv_indices: Tensor  # int32 [kv_indptr[-1]]
    kv_last_page_len: Tensor  # int32 [B]; tokens in its last page once this step has run, 1 to page_tokens
    slot_page: Tensor  # int64 [T]; the page that takes each token's key and value ...
    slot_offset: Tensor  # int64 [T]; ... and its place in it
    sample_rows: Tensor  # int64 [R]; rows whose logits are wanted


def build_batch(segments: Sequence[Segment], page_tokens: int) -> Batch:
    """Lay `segments` out in order.

    Raises:
        Internal: no segment, a segment without tokens, or too few pages for one.
    """
    if not segments:
        raise Internal("a batch needs a segment")
    pages = [_pages(segment, page_tokens) for segment in segments]
    lengths = [len(segment.tokens) for segment in segments]
    ends = np.array([segment.start + len(segment.tokens) for segment in segments], dtype=np.int64)
    positions = np.concatenate([np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)])
    indptr, kv_indptr = _indptr(lengths), _indptr([len(each) for each in pages])
    kv_indices = np.concatenate(pages)
    slots = np.repeat(kv_indptr[:-1], lengths) + positions // page_tokens
    sampling = np.array([segment.sample for segment in segments])
    return Batch(
        page_tokens=page_tokens,
        token_ids=torch.tensor([token for segment in segments for token in segment.tokens], dtype=torch.int64),
        positions=_int64(positions),
        qo_indptr=_int32(indptr),
        kv_indptr=_int32(kv_indptr),
        kv_indices=_int32(kv_indices),
        kv_last_page_len=_int32((ends - 1) % page_tokens + 1),
        slot_page=_int64(kv_indices[slots]),
        slot_offset=_int64(positions % page_tokens),
        sample_rows=_int64(indptr[1:][sampling] - 1),
    )


def _pages(segment: Segment, page_tokens: int) -> npt.NDArray[np.int64]:
    needed = -(-(segment.start + len(segment.tokens)) // page_tokens)
    if not segment.tokens or segment.start < 0 or len(segment.pages) < needed:
        raise Internal(f"{len(segment.tokens)} tokens at {segment.start} do not fit {len(segment.pages)} pages")
    return np.array(segment.pages[:needed], dtype=np.int64)


def _indptr(counts: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return where each row starts, and the end of the last."""
    return np.cumsum([0, *counts], dtype=np.int64)


def _int32(values: npt.NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))


def _int64(values: npt.NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(values.astype(np.int64, copy=False))
