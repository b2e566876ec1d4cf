"""SlotIndex: which slot holds which block, and which slot is written next.

CLOCK (Corbató 1968), first in first out with a second chance: a hand goes round the slots, passes over each that was
read since it came by last, and stops at the first other one. Slots are filled in the order in which they lie, so a disk
sees one long write, and blocks that are never asked for again leave in one round without pushing out those that are.

Pure bookkeeping; memory in proportion to the slots, time constant for each call (`next_slot`: amortized over reads).
"""

from __future__ import annotations

from collections.abc import Iterable

from twostroke.kv.tiers.header import Header


class SlotIndex:
    """The state of `slots` slots. `__contains__` and `__len__` may be asked by other threads at any time."""

    def __init__(self, slots: int, found: Iterable[tuple[int, Header]] = ()) -> None:
        """Start with what was found in the slots, as if it had been put there in the order of the serials."""
        self._headers: list[Header | None] = [None] * slots
        self._slots: dict[bytes, int] = {}
        self._read = bytearray(slots)  # since the hand came by
        self._hand = 0
        self.serial = 0  # of the next write
        for slot, header in sorted(found, key=lambda each: each[1].serial):
            self.put(slot, header)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def slots(self) -> int:
        """How many there are."""
        return len(self._headers)

    def find(self, key: bytes) -> tuple[int, Header] | None:
        """Where a block lies; this is no use of it."""
        slot = self._slots.get(key)
        header = None if slot is None else self._headers[slot]
        return None if slot is None or header is None else (slot, header)

    def touch(self, slot: int) -> None:
        """Give the block in this slot a second chance."""
        self._read[slot] = 1

    def next_slot(self) -> tuple[int, Header | None]:
        """The slot to be written next and the block that has to leave it. The same one, until something is put."""
        while self._read[self._hand]:
            self._read[self._hand] = 0
            self._hand = (self._hand + 1) % self.slots
        return self._hand, self._headers[self._hand]

    def put(self, slot: int, header: Header) -> None:
        """A slot without a block holds this one now; it is nowhere else."""
        self.drop(header.key)
        self._headers[slot] = header
        self._slots[header.key] = slot
        self._hand = (slot + 1) % self.slots
        self.serial = header.serial + 1

    def drop(self, key: bytes) -> None:
        """Forget a block, if it is held."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._headers[slot] = None
            self._read[slot] = 0
