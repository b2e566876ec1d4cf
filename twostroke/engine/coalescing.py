"""Coalescing: a block that a running sequence is about to fill is waited for, not computed once more."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a waiting sequence is passed over, and what it needs once it no longer is."""

    key: bytes  # of the last block that will be filled for it
    pages: int  # beyond those that it will share


class Leaders:
    """Running sequences by the keys of the blocks that they have yet to fill from tokens that they have.

    A key may have several: whoever ends or gives way takes only its own promise along. Only a sequence that holds pages
    is here, so whoever waits for a key waits for one that runs.
    """

    def __init__(self) -> None:
        self._by_key: dict[bytes, list[Sequence]] = {}

    @property
    def keys(self) -> int:
        """Blocks that are promised; none when nothing runs."""
        return len(self._by_key)

    def enter(self, sequence: Sequence) -> None:
        """Note what a sequence will fill, now that it has its pages."""
        for key in sequence.unfilled():
            self._by_key.setdefault(key, []).append(sequence)

    def filled(self, sequence: Sequence, key: bytes) -> None:
        """Forget a promise that was kept; one that was never made changes nothing."""
        leaders = self._by_key.get(key, [])
        if sequence in leaders:
            leaders.remove(sequence)
            if not leaders:
                del self._by_key[key]

    def leave(self, sequence: Sequence) -> None:
        """Forget what a sequence will not fill, since it loses its pages."""
        for key in sequence.unfilled():
            self.filled(sequence, key)

    def of(self, key: bytes, follower: Sequence) -> Sequence | None:
        """Who will fill a block and is of the follower's class, or a higher one.

        A lower one gets fewer tokens and gives way first: a higher class that waited for it would wait in its stead.
        """
        for leader in self._by_key.get(key, ()):
            if leader.request.priority <= follower.request.priority:
                return leader
        return None
