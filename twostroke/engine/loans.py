"""Pages in the hands of somebody outside the engine: an import that fills them, or an export that copies them out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from twostroke.engine.blocks import BlockPool
from twostroke.errors import Internal


class PageLoans:
    """Counts what is lent, so that a page given back twice is an error and never takes away a sequence's reference."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._lent: Counter[int] = Counter()

    @property
    def count(self) -> int:
        """Pages that have not come back, however often each is lent; zero when nothing is being copied."""
        return len(self._lent)

    def take(self, count: int) -> list[int]:
        """Lend up to `count` pages to be filled: fewer, or none, when memory is short. What they held is forgotten."""
        taken = self._pool.take(max(0, min(count, self._pool.available))) or []
        self._lent.update(taken)
        return taken

    def lend(self, pages: Sequence[int]) -> None:
        """Lend pages that are in use, to be read; they stay as they are until the loan comes back."""
        self._pool.hold(pages)
        self._lent.update(pages)

    def give_back(self, pages: Iterable[int]) -> None:
        """End a loan of each page.

        Raises:
            Internal: a page is not lent; pages before it are given back.
        """
        for page in pages:
            if self._lent[page] <= 0:
                raise Internal(f"page {page} is given back but was not lent")
            self._lent[page] -= 1
            if self._lent[page] == 0:
                del self._lent[page]
            self._pool.release((page,))

    def adopt(self, blocks: Sequence[tuple[int, bytes, int]]) -> None:
        """End loans of pages that were filled, keeping what they hold as cached and evictable.

        The last block is released first: eviction then takes a chain from its end.

        Args:
            blocks: (page, key, tokens) in the order of the sequence.

        Raises:
            Internal: a page is not lent; blocks after it are adopted.
        """
        for page, key, tokens in reversed(blocks):
            if self._lent[page] > 0:
                self._pool.publish(page, key, tokens)
            self.give_back((page,))
