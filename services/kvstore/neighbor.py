"""Neighbor: the store node of another host, as this one asks it for blocks. Control only: no byte of a block."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke import wire
from twostroke.errors import DeadlineExceeded, NotFound, TwostrokeError, Unavailable, WorkerLost
from twostroke.kv import messages
from twostroke.kv.format import KvFormat
from twostroke.kv.layout import Attachment
from twostroke.kv.refs import BlockSlot, Lease, Offer
from twostroke.kv.transport.frames import MAX_PLACES
from twostroke.kv.transport.peer import Grant
from twostroke.rpc.channel import connect
from twostroke.rpc.deadline import remaining
from twostroke.rpc.status import domain_errors
from twostroke.v1 import kvstore_pb2 as pb
from twostroke.v1.kvstore_pb2_grpc import KvStoreServiceStub

log = logging.getLogger(__name__)

LEASE_SECONDS = 10.0  # for a lease of our own, and at least for one that is lent: longer than any fetch
CALL_SECONDS = 2.0  # for a call, whatever the deadline


@dataclass(frozen=True, slots=True)
class Granted:
    """Leading blocks that a neighbor leased, and how they are read."""

    grant: Grant
    places: tuple[BlockSlot, ...]
    shared: int  # leading ones that everyone may see; those after are for this lease only
    offers: tuple[Offer, ...]
    ours: bool  # the lease, to be released


class Neighbor:
    """One connection to one node, which is introduced to by itself, and again when it has restarted."""

    def __init__(self, address: str, kv_format: KvFormat) -> None:
        self._channel = connect(address)
        self._stub = KvStoreServiceStub(self._channel)
        self._format = kv_format
        self._met: Attachment | None = None
        self._meeting = asyncio.Lock()
        self._releasing: set[asyncio.Task[None]] = set()

    async def grant(
        self, keys: Sequence[bytes], namespace: str, deadline: float, *, life: str, source: Lease | None = None
    ) -> Granted:
        """Lease the longest prefix of the keys that the neighbor has, in its arena or on its disk.

        Args:
            keys: of leading blocks.
            namespace: whose share of the neighbor's arena blocks take that it brings up from its disk.
            deadline: on the loop's clock.
            life: the incarnation that is said to hold them.
            source: a lease there, whose transient blocks are seen, too; where it has ended, one of our own has to do.

        Raises: TwostrokeError.
        """
        node = await self._attached(life, deadline)
        if source is not None and node.incarnation == source.incarnation:
            with contextlib.suppress(NotFound):
                return await self._acquired(node, source, keys, namespace, deadline)
        lease = Lease.named(LEASE_SECONDS)
        try:
            return await self._acquired(node, lease, keys, namespace, deadline)
        except BaseException:  # the answer may have been lost on its way
            self._release_behind(node.incarnation, lease.id)
            raise

    def release(self, granted: Granted) -> None:
        """End a lease of our own, behind the caller's back: trouble is logged, and the lease ends by time."""
        if granted.ours:
            self._release_behind(granted.grant.lease.incarnation, granted.grant.lease.id)

    async def close(self) -> None:
        """End the connection, behind all releases. Each of them has a time limit."""
        if self._releasing:
            await asyncio.wait(self._releasing)
        await self._channel.close()

    async def _attached(self, life: str, deadline: float) -> Attachment:
        """What the neighbor said of itself; asks again where another life of it is meant."""
        try:
            async with asyncio.timeout_at(deadline), self._meeting:
                if self._met is None or self._met.incarnation != life:
                    request = pb.AttachRequest(format=wire.kv_format_pb(self._format), follows=True)
                    with domain_errors(lost=Unavailable):
                        response = await self._stub.Attach(request, timeout=remaining(deadline, at_most=CALL_SECONDS))
                    self._met = messages.attachment(response, "")
                return self._met
        except TimeoutError as error:
            raise DeadlineExceeded("the neighbor does not answer") from error

    async def _acquired(
        self, node: Attachment, lease: Lease, keys: Sequence[bytes], namespace: str, deadline: float
    ) -> Granted:
        keys = keys[: min(node.max_keys, MAX_PLACES)]
        request = pb.AcquireRequest(
            incarnation=node.incarnation,
            lease_id=lease.id,
            lease_duration=wire.duration_pb(LEASE_SECONDS),
            opens=not lease.opened,
            keys=keys,
            namespace=namespace,
            own_only=True,
        )
        try:
            with domain_errors(lost=Unavailable):
                response = await self._stub.Acquire(request, timeout=remaining(deadline, at_most=CALL_SECONDS))
        except WorkerLost:
            self._met = None
            raise
        places = messages.block_slots(response.blocks)
        if [place.block.key for place in places] != list(keys[: len(places)]):
            raise Unavailable("the neighbor answered with blocks that it was not asked for")
        if not all(1 <= place.block.tokens <= self._format.block_tokens for place in places):
            raise Unavailable("the neighbor answered with blocks that cannot be")
        grant = Grant(messages.granted(lease, response.lease_duration, node), namespace, response.proof)
        return Granted(grant, places, min(response.shared, len(places)), node.offers, ours=not lease.opened)

    def _release_behind(self, incarnation: str, lease_id: str) -> None:
        task = asyncio.create_task(self._release(incarnation, lease_id), name="release")
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def _release(self, incarnation: str, lease_id: str) -> None:
        request = pb.ReleaseRequest(incarnation=incarnation, lease_ids=[lease_id])
        try:
            with domain_errors(lost=Unavailable):
                await self._stub.Release(request, timeout=CALL_SECONDS)
        except TwostrokeError as error:
            log.info("a neighbor's lease is left to end by time", extra={"reason": error.reason})
