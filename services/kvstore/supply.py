"""Supply: the ways in which a node comes by leading blocks: its arena, then its disk, then other hosts' nodes."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from services.kvstore.blocks import Blocks
from services.kvstore.gathering import Gathering, Need
from services.kvstore.promotion import Promotion
from twostroke.kv.refs import BlockSlot, Lease

PROMOTE_SECONDS = 10.0  # far over the time that a caller waits for a disk


class Supply:
    """Leases what the arena holds, once what it lacks was brought into it as far as possible.

    Args:
        promotion: from a disk, where there is one.
    """

    def __init__(self, blocks: Blocks, promotion: Promotion | None, gathering: Gathering) -> None:
        self.granted = 0  # blocks leased to other nodes, so far
        self.promotion = promotion
        self.gathering = gathering
        self._blocks = blocks

    async def acquire(self, lease: Lease, need: Need) -> list[BlockSlot]:
        """Lease the longest prefix that is held or can be brought in. Raises NotFound, when the lease has ended."""
        places = await self._acquire_own(lease, need.keys, need.namespace)
        if len(places) < len(need.keys) and not need.own_only:
            await self.gathering.gather(lease, need)
            places = self._blocks.acquire(lease, need.keys)
        if need.own_only:
            self.granted += len(places)
        return places

    async def promote(self, keys: Sequence[bytes], namespace: str) -> int:
        """Bring leading blocks from disk into the arena; answers how many are there now. Raises Overloaded.

        What is there already is used by it, and under a lease meanwhile, so that it does not give way to the rest.
        """
        lease = self._blocks.lease(secrets.token_hex(16), PROMOTE_SECONDS, opens=True)
        try:
            return len(await self._acquire_own(lease, keys, namespace))
        finally:
            self._blocks.release([lease.id])

    async def _acquire_own(self, lease: Lease, keys: Sequence[bytes], namespace: str) -> list[BlockSlot]:
        places = self._blocks.acquire(lease, keys)
        if self.promotion and len(places) < len(keys):
            await self.promotion.promote(lease, keys[len(places) :], namespace)
            places = self._blocks.acquire(lease, keys)
        return places

    async def reachable(self, keys: Sequence[bytes], lease_id: str, *, anywhere: bool) -> int:
        """How many leading keys could be leased, from this node alone or with what some other one holds."""
        count = self._blocks.reachable(keys, lease_id)
        if anywhere and count < len(keys):
            count += await self.gathering.elsewhere(keys[count:])
        return count
