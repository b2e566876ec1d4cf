"""Holdings: which keys a node holds, and what of that Redis has not been told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True, slots=True)
class Changes:
    """Keys to write, at most once each."""

    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


class Holdings:
    """A set of keys and a bounded list of changes, in order of the first.

    A key that comes and goes between two writes is not written. When there are too many changes, or it is uncertain
    which ones Redis knows, none is kept: then only the whole set will do. Pure bookkeeping; a key takes about 60 bytes.

    Args:
        backlog: changes that may wait.
    """

    def __init__(self, backlog: int) -> None:
        self.overflows = 0
        self.uncertain = True  # what Redis knows; so it is before the first write
        self._backlog = backlog
        self._held: set[bytes] = set()
        self._changes: dict[bytes, bool] = {}  # key -> whether it was added

    def __len__(self) -> int:
        return len(self._held)

    @property
    def waiting(self) -> int:
        """Changes that Redis has not been told."""
        return len(self._changes)

    def add(self, keys: Iterable[bytes]) -> None:
        """Note that keys are held; known ones are no news."""
        for key in keys:
            if key not in self._held:
                self._held.add(key)
                self._change(key, added=True)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Note that keys are gone; unknown ones are no news."""
        for key in keys:
            if key in self._held:
                self._held.remove(key)
                self._change(key, added=False)

    def take(self, limit: int) -> Changes:
        """The oldest changes, no longer kept here: the caller writes them, or calls `doubt`."""
        taken = list(islice(self._changes.items(), limit))
        for key, _ in taken:
            del self._changes[key]
        return Changes(tuple(key for key, added in taken if added), tuple(key for key, added in taken if not added))

    def whole(self) -> list[bytes]:
        """Every key held; changes are kept from here on. The caller writes them all, or calls `doubt`."""
        self._changes.clear()
        self.uncertain = False
        return list(self._held)

    def doubt(self) -> None:
        """It is unknown what Redis knows."""
        self._changes.clear()
        self.uncertain = True

    def _change(self, key: bytes, *, added: bool) -> None:
        if self.uncertain:
            return
        if key in self._changes:  # the opposite, since a change is always news
            del self._changes[key]
        elif len(self._changes) < self._backlog:
            self._changes[key] = added
        else:
            self.overflows += 1
            self.doubt()
