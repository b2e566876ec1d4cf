"""Supply: the ways in which a node comes by leading blocks: its arena, then its disk, then other hosts' nodes."""

from __future__ import annotations

from collections.abc import Sequence

from services.kvstore.blocks import Blocks
from services.kvstore.gathering import Gathering, Need
from services.kvstore.promotion import Promotion
from twostroke.kv.refs import BlockSlot, Lease


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
        places = self._blocks.acquire(lease, need.keys)
        if self.promotion and len(places) < len(need.keys):
            await self.promotion.promote(lease, need.keys[len(places) :], need.namespace)
            places = self._blocks.acquire(lease, need.keys)
        if len(places) < len(need.keys) and not need.own_only:
            await self.gathering.gather(lease, need)
            places = self._blocks.acquire(lease, need.keys)
        if need.own_only:
            self.granted += len(places)
        return places

    async def reachable(self, keys: Sequence[bytes], lease_id: str, *, anywhere: bool) -> int:
        """How many leading keys could be leased, from this node alone or with what some other one holds."""
        count = self._blocks.reachable(keys, lease_id)
        if anywhere and count < len(keys):
            count += await self.gathering.elsewhere(keys[count:])
        return count
