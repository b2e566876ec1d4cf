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
        self._holders: OrderedDict[bytes, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def record(self, worker: str, keys: Sequence[bytes]) -> None:
        """Expect these blocks, in prompt order, at a worker."""
        for key in reversed(keys):  # prompts are forgotten from their ends: without its first block the rest is no use
            self._holders.setdefault(key, set()).add(worker)
            self._holders.move_to_end(key)
        while len(self._holders) > self._max_keys:
            self._holders.popitem(last=False)

    def matched(self, worker: str, keys: Sequence[bytes]) -> int:
        """Leading keys expected at a worker."""
        count = 0
        for key in keys:
            if worker not in self._holders.get(key, ()):
                break
            count += 1
        return count

    def forget(self, worker: str) -> None:
        """Expect nothing at a worker any more: it was lost or started again."""
        for key in [key for key, holders in self._holders.items() if worker in holders]:
            self._holders[key].discard(worker)
            if not self._holders[key]:
                del self._holders[key]
