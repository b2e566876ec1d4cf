"""What each query of a step sees, as rows of a cache: for attention that gathers before it multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from twostroke.engine.batch import Batch

_SHORT = 128  # tokens; below this, padding or a wider mask costs less than another kernel call


@dataclass(frozen=True, slots=True)
class Decodes:
    """B single-token segments that see a similar number of tokens, attended at once."""

    queries: Tensor  # int64 [B]: their rows in the batch
    rows: Tensor  # int64 [B * longest]: token rows, padded with row 0 of the scratch page
    mask: Tensor | None  # float32 [B, 1, 1, longest], 0 or -inf; None when all are equally long


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one segment."""

    first: int
    last: int  # queries are rows first to last of the batch, last excluded
    rows: Tensor | None  # int64 [n]: token rows; None when the queries see nothing but themselves
    mask: Tensor | None  # float32 [last - first, n], 0 or -inf; None when all before a query is seen


@dataclass(frozen=True, slots=True)
class Sight:
    """What the queries of a step see through one window: decodes first, then longer segments."""

    decodes: tuple[Decodes, ...]
    chunks: tuple[Chunk, ...]

    @property
    def largest(self) -> int:
        """Token rows of the largest gather."""
        gathers = [group.rows for group in self.decodes] + [each.rows for each in self.chunks if each.rows is not None]
        return max((len(rows) for rows in gathers), default=0)


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


class Table:
    """The batch's page table as plain arrays, and the index tensors made from it.

    Row numbers are those of one layer's keys, or values, in a cache with one row a token and `page_rows` rows from a
    page to the next.

    Attributes:
        lengths: tokens of each segment, those of this step included.
    """

    def __init__(self, batch: Batch, page_rows: int) -> None:
        self._firsts = batch.qo_indptr.tolist()
        self._page_starts = batch.kv_indices.numpy().astype(np.int64) * page_rows
        self._page_tokens = batch.page_tokens
        self._kv_indptr = batch.kv_indptr.tolist()
        self._counts = batch.qo_indptr.diff().tolist()
        full = (batch.kv_indptr.diff() - 1) * batch.page_tokens
        self.lengths: list[int] = (full + batch.kv_last_page_len).tolist()

    def sight(self, window: int | None) -> Sight:
        """Say what each query sees of the latest `window` tokens, itself included; of all without a window."""
        seen = self.lengths if window is None else [min(length, window) for length in self.lengths]
        singles = [segment for segment, count in enumerate(self._counts) if count == 1]
        several = [segment for segment, count in enumerate(self._counts) if count > 1]
        return Sight(
            decodes=tuple(self._decodes(group, seen) for group in _by_length(singles, seen)),
            chunks=tuple(chunk for segment in several for chunk in self._chunks(segment, window)),
        )

    def _rows(self, segment: int, start: int, end: int) -> Tensor:
        """Return the token rows of a segment's tokens from `start` to `end`: int64 [end - start]."""
        pages = self._page_starts[self._kv_indptr[segment] :][start // self._page_tokens : -(-end // self._page_tokens)]
        rows = (pages[:, None] + np.arange(self._page_tokens)).reshape(-1)
        return torch.from_numpy(rows[start % self._page_tokens :][: end - start])

    def _decodes(self, segments: list[int], seen: list[int]) -> Decodes:
        lengths = [seen[segment] for segment in segments]
        longest = max(lengths)
        rows = torch.zeros((len(segments), longest), dtype=torch.int64)
        for at, segment in enumerate(segments):
            end = self.lengths[segment]
            rows[at, : lengths[at]] = self._rows(segment, end - lengths[at], end)
        beyond = torch.arange(longest) >= torch.tensor(lengths).unsqueeze(1)
        mask = torch.zeros(beyond.shape).masked_fill_(beyond, float("-inf"))[:, None, None]
        queries = torch.tensor([self._firsts[segment] for segment in segments])
        return Decodes(queries, rows.view(-1), None if min(lengths) == longest else mask)

    def _chunks(self, segment: int, window: int | None) -> Iterator[Chunk]:
        """Cut a segment into pieces no longer than its window, so that most of what is gathered is seen."""
        count, prefix = self._counts[segment], self.lengths[segment] - self._counts[segment]
        piece = count if window is None else max(window, _SHORT)
        for start in range(0, count, piece):
            queries = min(piece, count - start)
            end = prefix + start + queries
            keys = end if window is None else min(end, queries + window - 1)
            first = self._firsts[segment] + start
            causal = keys == queries and (window is None or window >= queries)
            rows = None if keys == queries else self._rows(segment, end - keys, end)
            yield Chunk(first, first + queries, rows, None if causal else _mask(queries, keys, window))


def _mask(queries: int, keys: int, window: int | None) -> Tensor:
    """Return float32 [queries, keys], 0 where a query sees a key, else -inf; the last of each are one token."""
    every = torch.ones((queries, keys), dtype=torch.bool)
    hidden = every.triu(keys - queries + 1)
    if window is not None:
        hidden |= every.tril(keys - queries - window)
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
