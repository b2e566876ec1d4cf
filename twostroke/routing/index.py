"""PrefixIndex: which worker probably holds which block, by what was sent where."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixIndex:
    """Predicted block locations, bounded: the least recently used keys are forgotten first.

    A prediction may be wrong, since workers evict without telling. It only steers; it never promises.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._bits: dict[str, int] = {}  # of each worker
        # The bits of a key's holders: for a few workers no object of its own, where a set would take 216 bytes.
        self._holders: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def record(self, worker: str, keys: Sequence[bytes]) -> None:
        """Expect these blocks, in prompt order, at a worker."""
        bit = self._bits.setdefault(worker, 1 << len(self._bits))
        for key in reversed(keys):  # prompts are forgotten from their ends: without its first block the rest is no use
            self._holders[key] = self._holders.get(key, 0) | bit
            self._holders.move_to_end(key)
        while len(self._holders) > self._max_keys:
            self._holders.popitem(last=False)

    def matched(self, worker: str, keys: Sequence[bytes]) -> int:
        """Leading keys expected at a worker."""
        bit, count = self._bits.get(worker, 0), 0
        for key in keys:
            if not self._holders.get(key, 0) & bit:
                break
            count += 1
        return count

    def forget(self, worker: str) -> None:
        """Expect nothing at a worker any more: it was lost or started again."""
        bit = self._bits.get(worker, 0)
        for key in [key for key, holders in self._holders.items() if holders & bit]:
            self._holders[key] &= ~bit
            if not self._holders[key]:
                del self._holders[key]
