"""Ways to move block bytes between a worker's pages and a store node. Each is a `BlockTransport`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from twostroke.kv.refs import ORDINARY, BlockRef, Lease, Terms


@dataclass(slots=True)
class Tenancy:
    """The lease that a transfer works under, and how what it writes is held.

    The first call opens the lease where it is not open yet. What the node lacks it may get under `source`, a lease at
    another node. A write notes in `writing` which blocks it left to another writer.
    """

    lease: Lease
    terms: Terms = ORDINARY
    source: Lease | None = None
    writing: set[bytes] = field(default_factory=set)


class BlockTransport(Protocol):
    """Moves blocks to and from one incarnation of a store node.

    A page named in a call is in use until the call returns. Calls name at most `max_keys` blocks and are never
    cancelled: `BlockStoreClient` carries each to its end, since its pages and slots are not free before.
    """

    name: str

    async def write(
        self, tenancy: Tenancy, blocks: Sequence[tuple[bytes, int]], pages: Sequence[int], deadline: float | None
    ) -> list[BlockRef]:
        """Store blocks (key, tokens) from pages, unless they are held already; answers those that the lease keeps."""

    async def read(self, tenancy: Tenancy, keys: Sequence[bytes], pages: Sequence[int], deadline: float | None) -> int:
        """Fill pages with the longest held prefix of the keys; answers how many blocks came whole."""

    async def close(self) -> None:
        """Give back what the transport holds; no call is open."""
