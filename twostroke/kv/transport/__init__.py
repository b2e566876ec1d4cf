"""Ways to move block bytes between a worker's pages and a store node. Each is a `BlockTransport`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from twostroke.kv.refs import BlockRef, Lease


@dataclass(frozen=True, slots=True)
class Stored:
    """What the store holds after a write, all under the lease; blocks that found no room are absent."""

    lease: Lease | None
    refs: tuple[BlockRef, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """How many leading blocks were read whole."""

    lease: Lease | None
    blocks: int


class BlockTransport(Protocol):
    """Moves blocks to and from one incarnation of a store node.

    A page named in a call is in use until the call returns. Calls name at most `max_keys` blocks and are never
    cancelled: `BlockStoreClient` carries each to its end, since its pages and slots are not free before.
    """

    name: str

    async def write(
        self, lease: Lease | None, blocks: Sequence[tuple[bytes, int]], pages: Sequence[int], deadline: float | None
    ) -> Stored:
        """Store blocks (key, tokens) from pages, unless they are held already. None opens a lease."""

    async def read(
        self, lease: Lease | None, keys: Sequence[bytes], pages: Sequence[int], deadline: float | None
    ) -> Loaded:
        """Fill pages with the longest held prefix of the keys. None opens a lease."""

    async def close(self) -> None:
        """Give back what the transport holds; no call is open."""
