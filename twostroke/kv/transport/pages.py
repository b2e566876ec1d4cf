"""A worker's pages as transports see them: bytes by page number, wherever the memory is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.uint8]  # one page's bytes: [block_bytes], contiguous


class Pages(Protocol):
    """Pages of one size. Calls block for the length of their copies and come from a thread other than the event loop's.

    A page named in a call is the caller's until the call returns. Calls may come from several threads.

    Attributes:
        block_bytes: of a page.
    """

    block_bytes: int

    def read(self, pages: Sequence[int], take: Callable[[int, Row], None]) -> None:
        """Call take(i, row) with the bytes of pages[i], in order; the row may be read until `take` returns."""

    def write(self, pages: Sequence[int], put: Callable[[int, Row], bool]) -> int:
        """Call put(i, row) to have it write the bytes of pages[i], in order, until one says that its bytes are no good.

        Returns: how many pages are whole; the page after them may hold anything.
        """


class HostPages:
    """Pages in the memory of this process: nothing lies between a page and what reads or writes it.

    Args:
        rows: uint8 [pages, block_bytes].
    """

    def __init__(self, rows: npt.NDArray[np.uint8]) -> None:
        self._rows = rows
        self.block_bytes: int = rows.shape[1]

    def read(self, pages: Sequence[int], take: Callable[[int, Row], None]) -> None:
        """Hand out the pages themselves."""
        for index, page in enumerate(pages):
            take(index, self._rows[page])

    def write(self, pages: Sequence[int], put: Callable[[int, Row], bool]) -> int:
        """Have the pages themselves written."""
        for index, page in enumerate(pages):
            if not put(index, self._rows[page]):
                return index
        return len(pages)
