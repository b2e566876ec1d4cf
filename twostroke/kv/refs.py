"""Names of stored blocks, of places in an arena, and of the leases that keep them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class BlockRef:
    """One stored block. A key never names two contents; the generation says which use of a slot is meant."""

    key: bytes
    generation: int
    tokens: int  # fewer than the format's block_tokens only in the last block of a prompt


@dataclass(frozen=True, slots=True)
class BlockSlot:
    """A written block and where it lies."""

    block: BlockRef
    slot: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """A slot that one writer may fill with the block named by `key`."""

    key: bytes
    generation: int
    slot: int

    def written(self, tokens: int) -> BlockSlot:
        """The block that the slot holds once `tokens` tokens were copied into it."""
        return BlockSlot(BlockRef(self.key, self.generation, tokens), self.slot)


@dataclass(frozen=True, slots=True)
class Offer:
    """A way in which a node gives blocks to other hosts' nodes. Only transports of the kind can read the address."""

    kind: str
    address: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a store holds the blocks of a write."""

    namespace: str = "default"  # whose share of the space they take
    transient: bool = False  # seen under the leases that have them only, and gone when the last of these ends


ORDINARY = Terms()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Keeps blocks in a store until it is released, or `seconds` have passed since it was last prolonged.

    It belongs to an attempt, not to a process: whoever knows it may renew, extend and release it. Whoever wants one
    makes up its name, and the first call that works under it opens it: so it can be released though the answer was
    lost.
    """

    id: str  # 32 hexadecimal digits
    seconds: float
    incarnation: str = ""  # of the store, once it is open; after a restart of the store the lease is void
    address: str = ""  # of the store, once it is open: host:port, as other hosts reach it

    @classmethod
    def named(cls, seconds: float) -> Self:
        """A lease under a new name, for a call to open."""
        return cls(id=secrets.token_hex(16), seconds=seconds)

    @property
    def opened(self) -> bool:
        """Whether a store knows it."""
        return bool(self.incarnation)
