"""Pages in a device's memory, moved by page number through staging memory that the host and the device both reach.

Pages are gathered on the device into one dense piece, which crosses the bus in one copy, and scattered the other way
round. Two stages take turns: while the host handles one, the device fills or empties the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from twostroke.engine.cuda.fence import Fence, fence_on, upload
from twostroke.kv.transport.pages import Row

_STAGES = 2
_STAGE_BYTES = 8 << 20  # enough for the bus to run at full speed, and small beside any cache


class CopyStream(Protocol):
    """A queue of copies beside the one that computes.

    Attributes:
        device: whose queue it is.
        pins: whether staging memory is pinned.
    """

    device: torch.device
    pins: bool

    def behind_compute(self) -> AbstractContextManager[object]:
        """Queue what the block queues here, behind all that computes so far."""


class CudaCopyStream:
    """A CUDA stream."""

    pins = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def behind_compute(self) -> AbstractContextManager[object]:
        """Wait on the device, not on the host, for the default stream: the engine computes there."""
        self._stream.wait_stream(torch.cuda.default_stream(self.device))
        return torch.cuda.stream(self._stream)


class StagedPages:
    """See twostroke.kv.transport.pages.Pages; a page's bytes are complete once the call that wrote it has returned.

    Args:
        data: the cache, [pages, ...], contiguous; a page's bytes are a multiple of 8.
        stream: where copies queue.
    """

    def __init__(self, data: Tensor, stream: CopyStream) -> None:
        # Words instead of bytes: a gather moves one element a thread.
        self._words = data.view(len(data), -1).view(torch.int64)
        self.block_bytes: int = self._words.shape[1] * self._words.itemsize
        self._stream = stream
        self._stages = [_Stage(self._words, stream) for _ in range(_STAGES)]
        self._turn = threading.Lock()  # the stages serve one call at a time

    def read(self, pages: Sequence[int], take: Callable[[int, Row], None]) -> None:
        """Gather on the device, cross the bus, hand out rows of the stage."""
        with self._turn:
            before: _Stage | None = None
            for stage, start, part in self._parts(pages):
                with self._stream.behind_compute():
                    stage.gather(self._words, start, part)
                if before is not None:
                    before.hand_out(take)
                before = stage
            if before is not None:
                before.hand_out(take)

    def write(self, pages: Sequence[int], put: Callable[[int, Row], bool]) -> int:
        """Have rows of the stage written, cross the bus, scatter on the device."""
        whole = 0
        with self._turn:
            try:
                for stage, start, part in self._parts(pages):
                    good = stage.take_in(start, len(part), put)
                    with self._stream.behind_compute():
                        stage.scatter(self._words, part[:good])
                    whole += good
                    if good < len(part):
                        break
            finally:  # whoever gives the pages back must not do so under a copy
                for stage in self._stages:
                    stage.done.synchronize()
        return whole

    def _parts(self, pages: Sequence[int]) -> Iterator[tuple[_Stage, int, Sequence[int]]]:
        """Cut a call into pieces of a stage's size, with the stage and the index of the first page."""
        size = self._stages[0].pages
        for number, start in enumerate(range(0, len(pages), size)):
            yield self._stages[number % _STAGES], start, pages[start : start + size]


class _Stage:
    """Dense memory on both sides of the bus, for as many pages as fit."""

    def __init__(self, words: Tensor, stream: CopyStream) -> None:
        page_words = words.shape[1]
        self.pages = max(1, _STAGE_BYTES // (page_words * words.itemsize))
        self._there = words.new_empty((self.pages, page_words))
        self._here = torch.empty((self.pages, page_words), dtype=words.dtype, pin_memory=stream.pins)
        self._rows = self._here.view(torch.uint8).numpy()
        self._start, self._count = 0, 0
        self.done: Fence = fence_on(stream.device)

    def gather(self, words: Tensor, start: int, pages: Sequence[int]) -> None:
        """Queue the way from the pages to the host; `start` is the index of the first in the call."""
        self._start, self._count = start, len(pages)
        there = self._there[: self._count]
        torch.index_select(words, 0, self._numbers(pages), out=there)
        self._here[: self._count].copy_(there, non_blocking=True)
        self.done.record()

    def hand_out(self, take: Callable[[int, Row], None]) -> None:
        """Wait for the gathered pages and hand them out."""
        self.done.synchronize()
        for index in range(self._count):
            take(self._start + index, self._rows[index])

    def take_in(self, start: int, count: int, put: Callable[[int, Row], bool]) -> int:
        """Have `count` rows written, once the device has read what was there; returns how many are good."""
        self.done.synchronize()
        for index in range(count):
            if not put(start + index, self._rows[index]):
                return index
        return count

    def scatter(self, words: Tensor, pages: Sequence[int]) -> None:
        """Queue the way from the host to the pages."""
        if pages:
            there = self._there[: len(pages)]
            there.copy_(self._here[: len(pages)], non_blocking=True)
            words.index_copy_(0, self._numbers(pages), there)
        self.done.record()

    def _numbers(self, pages: Sequence[int]) -> Tensor:
        return upload(torch.tensor(pages, dtype=torch.int64), self._there.device)
