"""The control calls that transports share, against one incarnation of a store node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke import wire
from twostroke.errors import Unavailable
from twostroke.kv import messages
from twostroke.kv.client import CALL_SECONDS, KvStoreClient
from twostroke.kv.layout import Attachment
from twostroke.kv.messages import WrittenBlock
from twostroke.kv.refs import BlockSlot, Reservation
from twostroke.kv.transport import Tenancy
from twostroke.rpc.deadline import remaining
from twostroke.v1 import kvstore_pb2 as pb

ACQUIRE_SECONDS = 5.0  # the node may bring blocks from its disk, and from other hosts' nodes: 1 and 2 s at most


@dataclass(frozen=True, slots=True)
class StoreCalls:
    """Reserve, commit, abandon, acquire; in domain types, each one call with a time limit. All raise TwostrokeError.

    Callers name at most `max_keys` keys.
    """

    client: KvStoreClient
    node: Attachment

    async def reserve(
        self, tenancy: Tenancy, keys: Sequence[bytes], deadline: float | None
    ) -> tuple[Sequence[Reservation], Sequence[BlockSlot]]:
        """Ask for slots; answers what is to be written, and what is held already."""
        with self.client.calls_to(self.node, tenancy.lease):
            request = pb.ReserveRequest(
                incarnation=self.node.incarnation,
                writer_id=self.node.writer_id,
                lease_id=tenancy.lease.id,
                lease_duration=wire.duration_pb(tenancy.lease.seconds),
                opens=not tenancy.lease.opened,
                keys=keys,
                namespace=tenancy.terms.namespace,
                transient=tenancy.terms.transient,
            )
            response = await self.client.stub.Reserve(request, timeout=remaining(deadline, at_most=CALL_SECONDS))
        tenancy.lease = messages.granted(tenancy.lease, response.lease_duration, self.node)
        reserved, held = messages.reservations(response.reserved), messages.block_slots(response.held)
        self._require_asked(keys, [*(each.key for each in reserved), *(each.block.key for each in held)])
        tenancy.writing.update(response.writing)
        return reserved, held

    async def commit(
        self, tenancy: Tenancy, blocks: Sequence[WrittenBlock], deadline: float | None
    ) -> frozenset[bytes]:
        """Publish blocks; answers the keys that are held and leased now."""
        with self.client.calls_to(self.node, tenancy.lease):
            request = pb.CommitRequest(
                incarnation=self.node.incarnation, lease_id=tenancy.lease.id, blocks=messages.written_blocks_pb(blocks)
            )
            response = await self.client.stub.Commit(request, timeout=remaining(deadline, at_most=CALL_SECONDS))
        return frozenset(response.committed)

    async def abandon(self, reservations: Sequence[Reservation]) -> None:
        """Give slots back whose copies have ended."""
        with self.client.calls_to(self.node):
            request = pb.AbandonRequest(
                incarnation=self.node.incarnation, blocks=messages.reservations_pb(reservations)
            )
            await self.client.stub.Abandon(request, timeout=CALL_SECONDS)

    async def acquire(
        self, tenancy: Tenancy, keys: Sequence[bytes], deadline: float | None, *, own_only: bool = False
    ) -> Sequence[BlockSlot]:
        """Lease the longest prefix that is held or can be brought in; answers where the blocks lie.

        With `own_only` nothing is brought from other hosts' nodes.
        """
        with self.client.calls_to(self.node, tenancy.lease, ACQUIRE_SECONDS):
            request = pb.AcquireRequest(
                incarnation=self.node.incarnation,
                lease_id=tenancy.lease.id,
                lease_duration=wire.duration_pb(tenancy.lease.seconds),
                opens=not tenancy.lease.opened,
                keys=keys,
                namespace=tenancy.terms.namespace,
                own_only=own_only,
                source=wire.lease_pb(tenancy.source) if tenancy.source else None,
            )
            response = await self.client.stub.Acquire(request, timeout=remaining(deadline, at_most=ACQUIRE_SECONDS))
        tenancy.lease = messages.granted(tenancy.lease, response.lease_duration, self.node)
        places = messages.block_slots(response.blocks)
        self._require_asked(keys, [place.block.key for place in places])
        return places

    def _require_asked(self, asked: Sequence[bytes], answered: Sequence[bytes]) -> None:
        """Refuse an answer about blocks that nobody asked for: what it means for the others cannot be known."""
        if not set(answered) <= set(asked):
            self.client.forget(self.node)
            raise Unavailable("the store answered with blocks that it was not asked for")
