"""Leases: who keeps which blocks of a store, and until when. Pure: times are floats in seconds, from any clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from twostroke.errors import NotFound, Overloaded
from twostroke.kv.deadlines import Deadlines
from twostroke.kv.refs import BlockSlot


@dataclass(slots=True)
class Block:
    """A committed block, where it lies, and how many leases keep it."""

    place: BlockSlot
    namespace: str
    leases: int = 0

    @property
    def key(self) -> bytes:
        """The block's name."""
        return self.place.block.key


@dataclass(slots=True)
class LeasedBlocks:
    """What one lease keeps, at most `limit` blocks."""

    limit: int
    blocks: dict[bytes, Block] = field(default_factory=dict)  # in prompt order, as they joined

    @property
    def room(self) -> int:
        """How many more may join."""
        return self.limit - len(self.blocks)


class Leases:
    """All leases that are alive.

    Args:
        limit: leases at once.
        blocks: under one lease.
        seconds: that a lease lives without being prolonged.
    """

    def __init__(self, *, limit: int, blocks: int, seconds: float) -> None:
        self._limit = limit
        self._max_blocks = blocks
        self._max_seconds = seconds
        self._leases: dict[str, LeasedBlocks] = {}
        self._ends: Deadlines[str] = Deadlines()

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._leases

    def open(self, lease_id: str, seconds: float, now: float) -> float:
        """Open an empty lease under a new id; answers for how long. Raises Overloaded at the bound on leases."""
        if len(self._leases) >= self._limit:
            wait = max(0.0, (self._ends.next() or now) - now)
            raise Overloaded(f"{self._limit} leases are open", field="lease_id", retry_after=wait)
        self._leases[lease_id] = LeasedBlocks(self._max_blocks)
        granted = min(seconds, self._max_seconds)
        self._ends.set(lease_id, now + granted)
        return granted

    def prolong(self, lease_id: str, seconds: float, now: float) -> float:
        """Let a lease live for `seconds` from now, or longer if it would anyway; answers the seconds granted.

        Raises: NotFound, when the lease has ended.
        """
        self.require(lease_id)
        granted = min(seconds, self._max_seconds)
        self._ends.set(lease_id, max(self._ends.at(lease_id), now + granted))
        return granted

    def get(self, lease_id: str) -> LeasedBlocks | None:
        """A lease, while it is alive."""
        return self._leases.get(lease_id)

    def require(self, lease_id: str) -> LeasedBlocks:
        """A lease that is alive. Raises NotFound."""
        lease = self._leases.get(lease_id)
        if lease is None:
            raise NotFound("the lease has ended", field="lease_id")
        return lease

    def end(self, lease_id: str) -> list[Block]:
        """End a lease, if it is alive; answers the blocks that no lease keeps any more, last of the prompt first.

        A block is of no use without those before it: in this order the ends of prompts are evicted first.
        """
        self._ends.discard(lease_id)
        lease, free = self._leases.pop(lease_id, None), []
        for block in reversed(lease.blocks.values() if lease else ()):
            block.leases -= 1
            if not block.leases:
                free.append(block)
        return free

    def pop_due(self, now: float) -> list[str]:
        """Leases whose time has come, to be ended."""
        return self._ends.pop_due(now)

    def next_expiry(self) -> float | None:
        """When the next lease ends."""
        return self._ends.next()
