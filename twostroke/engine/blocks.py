"""Who owns which page of the KV cache, and which pages hold a prefix that another sequence may share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twostroke.errors import Internal

SCRATCH_PAGE = 0  # padded rows read it, so it is never given out


@dataclass(frozen=True, slots=True)
class CachedPage:
    """A page whose content is known by key."""

    page: int
    tokens: int  # how many it holds; fewer than a whole block in a partial tail


class BlockPool:
    """Pages 1 to `pages` - 1, each in exactly one of three states.

    free        nobody refers to it and its content is unknown
    referenced  one or more owners; it may be known by key as well, and is then shared
    evictable   nobody refers to it but its key is known: a hit brings it back, a shortage takes the one unused longest

    Pure bookkeeping with integers. A page is given a key only once its bytes are complete, and loses the key in the
    same call that gives the page to somebody else, so the index never names bytes that are not there.
    """

    def __init__(self, pages: int) -> None:
        self._all = range(SCRATCH_PAGE + 1, pages)
        self._free = list(reversed(self._all))
        self._references = [0] * pages
        self._key_of: dict[int, bytes] = {}
        self._index: dict[bytes, CachedPage] = {}
        self._evictable: dict[int, None] = {}  # least recently used first
        self._changes = 0

    @property
    def capacity(self) -> int:
        """Pages that can be given out at all."""
        return len(self._all)

    @property
    def free(self) -> int:
        """Pages whose content is unknown and that nobody refers to."""
        return len(self._free)

    @property
    def evictable(self) -> int:
        """Cached pages that nobody refers to."""
        return len(self._evictable)

    @property
    def available(self) -> int:
        """Pages that `take` could give."""
        return len(self._free) + len(self._evictable)

    @property
    def changes(self) -> int:
        """How often a page lost its last owner, or got a key: while this stands still, what did not fit does not."""
        return self._changes

    def freed_by(self, pages: Iterable[int]) -> int:
        """How many pages would lose their last owner by a `release` of `pages`. Changes nothing."""
        return sum(self._references[page] == owners for page, owners in Counter(pages).items())

    def find(self, key: bytes) -> CachedPage | None:
        """The page known by `key`. Changes nothing and protects nothing: `hold` it before the next `take`."""
        return self._index.get(key)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of the longest head of `keys` that is cached, in order. Changes nothing, as `find`."""
        pages = []
        for key in keys:
            cached = self._index.get(key)
            if cached is None:
                break
            pages.append(cached.page)
        return pages

    def take(self, count: int) -> list[int] | None:
        """Give `count` pages, one reference each, evicting as needed; None, and no change, when there are too few."""
        if count > self.available:
            return None
        while len(self._free) < count:
            self._forget(next(iter(self._evictable)))
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def hold(self, pages: Iterable[int]) -> None:
        """Add a reference to each page; a page that is free cannot be held.

        Raises:
            Internal: a page is free or does not exist; pages before it are held.
        """
        for page in pages:
            if page not in self._all or (self._references[page] == 0 and page not in self._evictable):
                raise Internal(f"page {page} is not in use and cannot be held")
            self._evictable.pop(page, None)
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take a reference off each page; the last one makes it evictable when it has a key, else free.

        The order is the order of eviction: name a sequence's last page first, since a block is of no use without the
        blocks before it.

        Raises:
            Internal: a page has no reference; pages before it are released.
        """
        for page in pages:
            if page not in self._all or self._references[page] == 0:
                raise Internal(f"page {page} is released more often than it was held")
            self._references[page] -= 1
            if self._references[page] == 0:
                self._changes += 1
                if page in self._key_of:
                    self._evictable[page] = None
                else:
                    self._free.append(page)

    def touch(self, page: int) -> bool:
        """Make an evictable page the last one to be evicted; False, and no change, for a page in use."""
        if page not in self._evictable:
            return False
        del self._evictable[page]
        self._evictable[page] = None
        return True

    def publish(self, page: int, key: bytes, tokens: int) -> bool:
        """Make a referenced page known by `key`, now that its bytes are complete.

        The first page under a key stays; a second one with the same content remains its owner's alone.

        Returns: whether the page is now the one known by `key`.

        Raises:
            Internal: nobody refers to the page, or it has another key already.
        """
        if page not in self._all or self._references[page] == 0 or self._key_of.get(page, key) != key:
            raise Internal(f"page {page} cannot take a key")
        known = self._index.setdefault(key, CachedPage(page, tokens))
        if known.page != page:
            return False
        self._key_of[page] = key
        self._changes += 1
        return True

    def reset(self) -> None:
        """Forget every key. Pages in use stay with their owners."""
        for page in tuple(self._evictable):
            self._forget(page)
        self._index.clear()
        self._key_of.clear()

    def check_integrity(self) -> None:
        """Prove that every page is in exactly one state and that keys and pages name each other.

        Raises:
            Internal: they do not, with the counts.
        """
        referenced = [page for page in self._all if self._references[page] > 0]
        states = sorted([*self._free, *self._evictable, *referenced])
        mutual = {cached.page: key for key, cached in self._index.items()}
        keyed = all(page in self._key_of for page in self._evictable)
        if states != list(self._all) or min(self._references) < 0 or mutual != self._key_of or not keyed:
            raise Internal(
                f"pages do not add up: {self.free} free, {self.evictable} evictable, {len(referenced)} referenced"
                f" of {self.capacity}; {len(self._key_of)} with keys, {len(self._index)} in the index"
            )

    def _forget(self, page: int) -> None:
        """Turn an evictable page into a free one: the key goes in the same breath."""
        del self._evictable[page]
        del self._index[self._key_of.pop(page)]
        self._free.append(page)
