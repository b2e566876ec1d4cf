"""Claims: the slots that are being written, by whom, and on which terms.

A slot is reserved until a deadline. After that it is quarantined: its key may be written elsewhere, but the slot is
nobody's until its writer says that the copy has ended, or is known to be gone. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.kv.deadlines import Deadlines
from twostroke.kv.refs import Reservation, Terms


@dataclass(slots=True)
class Claim:
    """A reservation, whose it is, and how its block will be held."""

    reservation: Reservation
    writer: str
    terms: Terms


class Claims:
    """Claims on some of `slots` slots; which ones are free is the owner's business."""

    def __init__(self, slots: int) -> None:
        self._generations = [0] * slots
        self._claims: dict[int, Claim] = {}  # by slot: reserved and quarantined
        self._reserved: dict[bytes, int] = {}  # key -> slot, while the deadline has not passed
        self._ends: Deadlines[int] = Deadlines()

    @property
    def reserved(self) -> int:
        """Slots whose deadline has not passed."""
        return len(self._reserved)

    @property
    def quarantined(self) -> int:
        """Slots whose deadline has passed."""
        return len(self._claims) - len(self._reserved)

    def add(self, slot: int, key: bytes, writer: str, terms: Terms, until: float) -> Reservation:
        """Reserve a slot. From here on a reader that is still copying the block before will notice."""
        self._generations[slot] += 1
        reservation = Reservation(key, self._generations[slot], slot)
        self._claims[slot] = Claim(reservation, writer, terms)
        self._reserved[key] = slot
        self._ends.set(slot, until)
        return reservation

    def of_key(self, key: bytes) -> Claim | None:
        """The claim under which a block is being written, before its deadline."""
        slot = self._reserved.get(key)
        return None if slot is None else self._claims[slot]

    def find(self, reservation: Reservation) -> Claim | None:
        """The claim of this very reservation."""
        claim = self._claims.get(reservation.slot)
        return claim if claim and claim.reservation == reservation else None

    def is_reserved(self, claim: Claim) -> bool:
        """Whether the claim's deadline has not passed."""
        return self._reserved.get(claim.reservation.key) == claim.reservation.slot

    def drop(self, claim: Claim) -> None:
        """End a claim: its copy has ended."""
        if self.is_reserved(claim):
            del self._reserved[claim.reservation.key]
        self._ends.discard(claim.reservation.slot)
        del self._claims[claim.reservation.slot]

    def expire(self, now: float) -> list[bytes]:
        """Quarantine slots whose time has come; answers the keys that nobody writes any more."""
        late = [self._claims[slot].reservation.key for slot in self._ends.pop_due(now)]
        for key in late:
            del self._reserved[key]
        return late

    def next_expiry(self) -> float | None:
        """When `expire` has something to do next."""
        return self._ends.next()

    def late_writers(self) -> set[str]:
        """Writers that slots are quarantined for."""
        return {claim.writer for claim in self._claims.values() if not self.is_reserved(claim)}

    def of_writer(self, writer: str) -> list[Reservation]:
        """Everything that one writer has claimed."""
        return [claim.reservation for claim in self._claims.values() if claim.writer == writer]
