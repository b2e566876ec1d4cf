"""EvictionQueue: which block of one namespace goes first.

ARC (Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003). A new block stands in the
queue of those that were used once; when a lease takes a block that is there, it moves to the queue of those that were
used again. Both are in order of last use. Keys of evicted blocks stay for a while in the ghost of their queue: a block
that comes back shows that its queue was too short, and shifts the share of the space that each of the two has. So
blocks that nobody asks for again push out nothing that is in use, however many they are; and where recency serves
better, as among conversations, the shares follow.

What differs from the paper, since blocks belong to prompts and are used under leases:

    leased     A leased block stands in no queue and cannot be evicted. It comes back to the end of its queue when its
               last lease ends.
    heads      A block is of no use without those before it. Whoever ends a lease names its last block first, so in each
               queue a block stands behind those that follow it.
    shares     The queues share what could be evicted now, which changes with every lease: a share is a fraction.
    advice     Blocks to be forgotten go before all others, blocks to be kept after all others.

Pure, and bounded: a ghost never has more keys than there are blocks. Each call takes constant time, amortized.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

LEAST_SHARE = 0.1  # of what could be evicted, for either queue; where the queue of new blocks starts

_Queue = OrderedDict[bytes, None]  # from the next to go to the last; a plain dict takes linear time to find its first


@dataclass(slots=True)
class _Entry:
    home: _Queue  # used once, or again
    queue: _Queue  # where it stands, or comes back to once no lease has it


class EvictionQueue:
    """The committed blocks of one namespace, by key; its length is how many of them could be evicted now."""

    def __init__(self) -> None:
        self._entries: dict[bytes, _Entry] = {}
        self._forgotten: _Queue = OrderedDict()
        self._once: _Queue = OrderedDict()
        self._again: _Queue = OrderedDict()
        self._kept: _Queue = OrderedDict()
        self._once_ghost: _Queue = OrderedDict()
        self._again_ghost: _Queue = OrderedDict()
        self._once_share = LEAST_SHARE

    def __len__(self) -> int:
        return len(self._forgotten) + len(self._once) + len(self._again) + len(self._kept)

    def add(self, key: bytes) -> bool:
        """Queue a new block; answers whether it was evicted not long ago."""
        back = self._learn(key)
        home = self._again if back else self._once
        self._entries[key] = _Entry(home, home)
        home[key] = None
        return back

    def pin(self, key: bytes) -> None:
        """Take a block out of its queue: it is leased now."""
        del self._entries[key].queue[key]

    def unpin(self, key: bytes) -> None:
        """Queue a block again: its last lease has ended."""
        self._entries[key].queue[key] = None

    def use(self, key: bytes) -> None:
        """Note that a lease took a block that was there; one that was to be forgotten is not any more."""
        entry = self._entries[key]
        entry.home = self._again
        if entry.queue is not self._kept:
            self._move(key, self._again)

    def keep(self, key: bytes) -> None:
        """Let a block go after all that are not kept."""
        self._move(key, self._kept)

    def unkeep(self, key: bytes) -> None:
        """Let a block that was kept go like any other."""
        self._move(key, self._entries[key].home)

    def forget(self, key: bytes) -> bool:
        """Let a block go before all others; answers whether it does: a leased one is left alone."""
        standing = key in self._entries[key].queue
        if standing:
            self._move(key, self._forgotten)
        return standing

    def evict(self) -> bytes | None:
        """Give up the next block, if any could go."""
        if self._forgotten:
            key, _ = self._forgotten.popitem(last=False)
        elif self._once or self._again:
            once = len(self._once) >= self._once_share * (len(self._once) + len(self._again))
            queue, ghost = (self._once, self._once_ghost) if once else (self._again, self._again_ghost)
            key, _ = queue.popitem(last=False)
            ghost[key] = None
        elif self._kept:
            key, _ = self._kept.popitem(last=False)
        else:
            return None
        del self._entries[key]
        for ghost in (self._once_ghost, self._again_ghost):
            while len(ghost) > len(self._entries):
                ghost.popitem(last=False)
        return key

    def _learn(self, key: bytes) -> bool:
        """Give more room to the queue that gave up a block too early, the more the seldomer that happens to it."""
        once, again = len(self._once_ghost), len(self._again_ghost)
        if key in self._once_ghost:
            del self._once_ghost[key]
            step = max(1.0, again / once)
        elif key in self._again_ghost:
            del self._again_ghost[key]
            step = -max(1.0, once / again)
        else:
            return False
        share = self._once_share + step / max(1, len(self._entries))
        self._once_share = min(max(share, LEAST_SHARE), 1 - LEAST_SHARE)
        return True

    def _move(self, key: bytes, queue: _Queue) -> None:
        entry = self._entries[key]
        if key in entry.queue:
            del entry.queue[key]
            queue[key] = None
        entry.queue = queue
