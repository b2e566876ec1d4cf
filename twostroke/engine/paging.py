"""The pages of a sequence: found, given, grown, published and freed. Keeps block pool and sequence in agreement."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from twostroke.engine.blocks import BlockPool
from twostroke.engine.coalescing import Leaders, Wait
from twostroke.engine.loans import PageLoans
from twostroke.engine.outputs import FilledBlock
from twostroke.engine.sequence import Sequence
from twostroke.engine.step import PageCopy


@dataclass(frozen=True, slots=True)
class Prefix:
    """What of a waiting sequence is in pages already."""

    pages: list[int]  # full blocks, to share
    tail: int | None  # a page to copy, since the sequence goes on writing in that block
    tokens: int  # found in all


class Paging:
    """Moves pages between the pool and sequences."""

    def __init__(self, pool: BlockPool, loans: PageLoans, page_tokens: int) -> None:
        self._pool = pool
        self._loans = loans
        self._page_tokens = page_tokens
        self._leaders = Leaders()

    @property
    def promised(self) -> int:
        """Blocks that running sequences have yet to fill from tokens that they have."""
        return self._leaders.keys

    @property
    def changes(self) -> int:
        """See `BlockPool.changes`."""
        return self._pool.changes

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self._page_tokens)

    def find(self, sequence: Sequence) -> Prefix:
        """The longest cached prefix: full blocks, then an exact tail. At least one token is left to run."""
        pages = self._pool.match(sequence.keys[: self._sharable(sequence)])
        for key, tokens in sequence.tails(len(pages)):
            cached = self._pool.find(key)
            if cached is not None:
                return Prefix(pages, cached.page, tokens)
        return Prefix(pages, None, len(pages) * self._page_tokens)

    def wait(self, sequence: Sequence, prefix: Prefix) -> Wait | None:
        """What a running sequence will fill next to a prefix that was found; None when there is nothing to wait for.

        It goes up to the last block that both share, so that who waits is looked at again once and not block by block.
        """
        if prefix.tail is not None:
            return None  # but for the last token, everything was found
        blocks, sharable, key = len(prefix.pages), self._sharable(sequence), None
        if blocks < sharable and (leader := self._leaders.of(sequence.keys[blocks], sequence)) is not None:
            mine, theirs = sequence.keys, leader.keys
            both = range(min(sharable, len(theirs)))  # keys are chained: from the first that differs on, all do
            blocks = bisect_left(both, True, lo=blocks, key=lambda block: mine[block] != theirs[block])
            key = mine[blocks - 1]
        if blocks == sharable:
            key = next((tail for tail, _ in sequence.tails(blocks) if self._leaders.of(tail, sequence)), key)
        return Wait(key, self.pages_for(sequence.length_to_admit) - blocks) if key is not None else None

    def lasts(self, wait: Wait, sequence: Sequence) -> bool:
        """Whether a wait goes on: the block is not there yet, and who will fill it still runs. Cheap: no search."""
        return self._pool.find(wait.key) is None and self._leaders.of(wait.key, sequence) is not None

    def fits(self, sequence: Sequence, prefix: Prefix, without: Iterable[Sequence], keep: int) -> bool:
        """Whether `reserve` would succeed, and leave `keep` pages, once the sequences in `without` have been freed."""
        self._pool.hold(prefix.pages)
        room = self._pool.available + self._pool.freed_by(page for each in without for page in each.pages)
        self._pool.release(reversed(prefix.pages))
        return self._missing(sequence, prefix) + keep <= room

    def reserve(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Give a waiting sequence all the pages it needs to begin, or nothing at all.

        The tail's page is not held: its copy is made before anything runs, in order of admission, so even a page that
        this very step takes for something else still has its bytes by then.
        """
        self._pool.hold(prefix.pages)
        if prefix.tail is not None:
            self._pool.touch(prefix.tail)
        taken = self._pool.take(self._missing(sequence, prefix))
        if taken is None:
            self._pool.release(reversed(prefix.pages))
            return False
        sequence.pages = prefix.pages + taken
        sequence.computed = prefix.tokens
        sequence.published = len(prefix.pages)
        self._leaders.enter(sequence)
        return True

    def copy_of(self, sequence: Sequence, prefix: Prefix) -> PageCopy | None:
        """The copy that gives a sequence with fresh pages its tail, if it found one."""
        target = sequence.pages[len(prefix.pages)]
        return None if prefix.tail is None or prefix.tail == target else PageCopy(prefix.tail, target)

    def grow(self, sequence: Sequence) -> bool:
        """Make room for the newest token; False, and no change, when the pool is empty."""
        missing = self.pages_for(len(sequence.tokens)) - len(sequence.pages)
        taken = self._pool.take(max(0, missing))
        if taken is None:
            return False
        sequence.pages += taken
        return True

    def free(self, sequence: Sequence) -> None:
        """Take a sequence's pages back; what was published stays cached, and its end is evicted first."""
        self._leaders.leave(sequence)
        self._pool.release(reversed(sequence.pages))
        sequence.pages = []
        sequence.computed = 0

    def publish(self, sequence: Sequence, *, tail: bool) -> tuple[FilledBlock, ...]:
        """Put the blocks that are full into the prefix index; returns those to be exported, each lent.

        Args:
            sequence: after its `computed` tokens grew.
            tail: whether the partial block after them counts too. It must not be written again.
        """
        sequence.extend_keys()
        full = sequence.computed // self._page_tokens
        for block in range(sequence.published, full):
            self._pool.publish(sequence.pages[block], sequence.keys[block], self._page_tokens)
            self._leaders.filled(sequence, sequence.keys[block])
        sequence.published = max(sequence.published, full)
        if not sequence.request.export:
            return ()
        filled = [self._filled(sequence, block, sequence.keys[block]) for block in range(sequence.exported, full)]
        sequence.exported = max(sequence.exported, full)
        if tail and sequence.computed > full * self._page_tokens:
            key = sequence.tail_key(full)
            rest = self._filled(sequence, full, key)
            self._pool.publish(rest.page, key, rest.tokens)
            filled.append(rest)
        self._loans.lend([block.page for block in filled])
        return tuple(filled)

    def _sharable(self, sequence: Sequence) -> int:
        """Leading full blocks that a sequence never writes into, since at least one token is left to run."""
        return (len(sequence.tokens) - 1) // self._page_tokens

    def _missing(self, sequence: Sequence, prefix: Prefix) -> int:
        """Pages that a waiting sequence needs beyond those it can share."""
        return self.pages_for(sequence.length_to_admit) - len(prefix.pages)

    def _filled(self, sequence: Sequence, block: int, key: bytes) -> FilledBlock:
        return FilledBlock(
            key=key,
            page=sequence.pages[block],
            tokens=min(self._page_tokens, sequence.computed - block * self._page_tokens),
            index=block,
            parent=sequence.parent(block),
        )
