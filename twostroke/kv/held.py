"""HeldBlocks: the committed blocks of a store, who sees them, and which of them go.

A transient block is seen under the leases that have it and nowhere else, and goes when the last of them ends. A writer
whose block shall stay finds it all the same and makes it an ordinary one: a key never names two contents, so there is
no need for two copies. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Protocol

from twostroke.kv.leases import Block, LeasedBlocks
from twostroke.kv.namespaces import Namespaces


class News(Protocol):
    """Is told at once which blocks everyone sees from now on, and which nobody does any more. Does no I/O."""

    def add(self, keys: Iterable[bytes]) -> None:
        """Everyone sees these blocks now."""

    def remove(self, keys: Iterable[bytes]) -> None:
        """These blocks are gone."""


class NoNews:
    """For a store of which nobody else shall know. See News."""

    def add(self, keys: Iterable[bytes]) -> None:
        """See News."""

    def remove(self, keys: Iterable[bytes]) -> None:
        """See News."""


class HeldBlocks:
    """Blocks by key. What they take of the space is `spaces`' business."""

    def __init__(self, spaces: Namespaces, news: News) -> None:
        self._spaces = spaces
        self._news = news
        self._ordinary: dict[bytes, Block] = {}
        self._transient: dict[bytes, Block] = {}  # each under a lease, but for the moment of its commit

    def __len__(self) -> int:
        return len(self._ordinary) + len(self._transient)

    def __contains__(self, key: bytes) -> bool:
        """Whether everyone sees the block."""
        return key in self._ordinary

    @property
    def transient(self) -> int:
        """How many are transient."""
        return len(self._transient)

    def get(self, key: bytes) -> Block | None:
        """A block, whoever sees it."""
        return self._ordinary.get(key) or self._transient.get(key)

    def seen(self, key: bytes, lease: LeasedBlocks) -> Block | None:
        """A block, as seen under a lease."""
        return lease.blocks.get(key) or self._ordinary.get(key)

    def count(self, keys: Iterable[bytes], lease: LeasedBlocks | None) -> int:
        """How many leading keys are seen, under a lease or without."""
        mine: dict[bytes, Block] = lease.blocks if lease else {}
        held = 0
        for key in keys:
            if key not in self._ordinary and key not in mine:
                break
            held += 1
        return held

    def add(self, block: Block, *, transient: bool) -> None:
        """Hold a block, in a slot that its namespace holds already."""
        if transient:
            self._transient[block.key] = block
        else:
            self._ordinary[block.key] = block
            self._spaces.add(block.namespace, block.key)
            self._news.add((block.key,))

    def make_ordinary(self, key: bytes) -> bool:
        """Let a transient block stay; answers whether there was one."""
        block = self._transient.pop(key, None)
        if block is None:
            return False
        self.add(block, transient=False)
        self._spaces.pin(block.namespace, key)
        return True

    def join(self, lease: LeasedBlocks, block: Block, *, used: bool) -> bool:
        """Put a block under a lease, which is a use of it unless it is its first; False when the lease has no room."""
        if block.key in lease.blocks:
            return True
        if not lease.room:
            return False
        lease.blocks[block.key] = block
        block.leases += 1
        if block.key in self._ordinary:
            if block.leases == 1:
                self._spaces.pin(block.namespace, block.key)
            if used:
                self._spaces.use(block.namespace, block.key)
        return True

    def unleased(self, block: Block) -> bool:
        """Note that no lease has a block any more; answers whether it is gone, since it was transient."""
        if self._transient.pop(block.key, None) is not None:
            return True
        self._spaces.unpin(block.namespace, block.key)
        return False

    def evict_for(self, namespace: str) -> Block | None:
        """Give up a block so that a namespace may have its slot."""
        key = self._spaces.evict_for(namespace)
        if key is None:
            return None
        self._news.remove((key,))
        return self._ordinary.pop(key)

    def keep(self, namespace: str, keys: Iterable[bytes], until: float) -> int:
        """Evict leading blocks of a namespace after all its others; answers how many."""
        return self._spaces.keep(namespace, takewhile(lambda key: self._is_of(namespace, key), keys), until)

    def unkeep(self, namespace: str, keys: Iterable[bytes]) -> None:
        """Evict blocks of a namespace like any other."""
        for key in filter(lambda key: self._is_of(namespace, key), keys):
            self._spaces.unkeep(key)

    def forget(self, namespace: str, keys: Sequence[bytes]) -> int:
        """Evict blocks of a namespace before all its others, ends of prompts first; answers how many will."""
        return sum(self._is_of(namespace, key) and self._spaces.forget(namespace, key) for key in reversed(keys))

    def _is_of(self, namespace: str, key: bytes) -> bool:
        block = self._ordinary.get(key)
        return block is not None and block.namespace == namespace
