"""The control calls that transports share, against one incarnation of a store node."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke import wire
from twostroke.errors import TwostrokeError
from twostroke.kv import messages
from twostroke.kv.client import CALL_SECONDS, KvStoreClient
from twostroke.kv.refs import BlockSlot, Lease, Reservation
from twostroke.rpc.deadline import remaining
from twostroke.v1 import kvstore_pb2 as pb

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreCalls:
    """Reserve, commit, abandon, acquire; in domain types, each with a time limit. All raise TwostrokeError."""

    client: KvStoreClient
    writer_id: str
    lease_seconds: float

    async def reserve(
        self, lease: Lease | None, keys: Sequence[bytes], deadline: float | None
    ) -> tuple[Lease, list[Reservation], list[BlockSlot]]:
        """Ask for slots; answers the lease, what is to be written, and what is held already."""
        reserved: list[Reservation] = []
        held: list[BlockSlot] = []
        async with self.client.calls(deadline, lease) as node:
            for start in range(0, max(1, len(keys)), node.max_keys):
                request = pb.ReserveRequest(
                    incarnation=node.incarnation,
                    writer_id=self.writer_id,
                    lease_id=lease.id if lease else "",
                    lease_duration=wire.duration_pb(self.lease_seconds),
                    keys=keys[start : start + node.max_keys],
                )
                response = await self.client.stub.Reserve(request, timeout=remaining(deadline, at_most=CALL_SECONDS))
                lease = messages.lease(response.lease_id, response.lease_duration, node.incarnation)
                reserved += messages.reservations(response.reserved)
                held += messages.block_slots(response.held)
        assert lease is not None
        return lease, reserved, held

    async def commit(self, lease: Lease, blocks: Sequence[pb.WrittenBlock], deadline: float | None) -> frozenset[bytes]:
        """Publish blocks; answers the keys that are held and leased now."""
        keys: set[bytes] = set()
        async with self.client.calls(deadline, lease) as node:
            for start in range(0, len(blocks), node.max_keys):
                request = pb.CommitRequest(
                    incarnation=node.incarnation, lease_id=lease.id, blocks=blocks[start : start + node.max_keys]
                )
                response = await self.client.stub.Commit(request, timeout=remaining(deadline, at_most=CALL_SECONDS))
                keys.update(response.committed)
        return frozenset(keys)

    async def abandon(self, lease: Lease, reservations: Sequence[Reservation]) -> None:
        """Give slots back whose copies have ended. Trouble is logged: the node finds out when this process ends."""
        try:
            async with self.client.calls(None, lease) as node:
                for start in range(0, len(reservations), node.max_keys):
                    blocks = messages.reservations_pb(reservations[start : start + node.max_keys])
                    request = pb.AbandonRequest(incarnation=node.incarnation, blocks=blocks)
                    await self.client.stub.Abandon(request, timeout=CALL_SECONDS)
        except TwostrokeError as error:
            log.warning("slots not given back", extra={"reason": error.reason, "slots": len(reservations)})

    async def acquire(
        self, lease: Lease | None, keys: Sequence[bytes], deadline: float | None
    ) -> tuple[Lease, list[BlockSlot]]:
        """Lease the longest held prefix; answers the lease and where the blocks lie."""
        places: list[BlockSlot] = []
        async with self.client.calls(deadline, lease) as node:
            for start in range(0, max(1, len(keys)), node.max_keys):
                part = keys[start : start + node.max_keys]
                request = pb.AcquireRequest(
                    incarnation=node.incarnation,
                    lease_id=lease.id if lease else "",
                    lease_duration=wire.duration_pb(self.lease_seconds),
                    keys=part,
                )
                response = await self.client.stub.Acquire(request, timeout=remaining(deadline, at_most=CALL_SECONDS))
                lease = messages.lease(response.lease_id, response.lease_duration, node.incarnation)
                places += messages.block_slots(response.blocks)
                if len(response.blocks) < len(part):
                    break
        assert lease is not None
        return lease, places
