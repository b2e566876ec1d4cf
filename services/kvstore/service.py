"""KvStoreService: protobuf to domain and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc

from services.kvstore.blocks import Blocks
from services.kvstore.gathering import Need
from services.kvstore.node import Node
from services.kvstore.status import status_pb
from services.kvstore.streams import Incoming, Piece, Seal, outgoing, receiving
from twostroke.errors import InvalidRequest
from twostroke.kv import messages
from twostroke.kv.refs import Lease
from twostroke.rpc.deadline import deadline_of
from twostroke.rpc.interceptor import Context
from twostroke.v1 import kvstore_pb2 as pb
from twostroke.v1.kvstore_pb2_grpc import KvStoreServiceServicer, add_KvStoreServiceServicer_to_server
from twostroke.wire import check_keys, check_lease_id, duration_pb, kv_format


class KvStoreService(KvStoreServiceServicer):
    """Serves one node. The contract is in kvstore.proto."""

    full_name = pb.DESCRIPTOR.services_by_name["KvStoreService"].full_name

    def __init__(self, node: Node) -> None:
        self._node = node

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer to the server."""
        add_KvStoreServiceServicer_to_server(self, server)

    async def Attach(self, request: pb.AttachRequest, context: Context) -> pb.AttachResponse:
        """Introduce a worker."""
        writer = messages.writer_id(request.writer_id) if request.writer_id else ""
        return messages.attachment_pb(self._node.attach(kv_format(request.format), writer, follows=request.follows))

    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        """Count leading keys that are held."""
        self._blocks(request.incarnation, request.keys)
        supply = self._node.supply(request.incarnation)
        held = await supply.reachable(request.keys, request.lease_id, anywhere=request.anywhere)
        return pb.LookupResponse(held=held)

    async def Await(self, request: pb.AwaitRequest, context: Context) -> pb.AwaitResponse:
        """Wait until blocks are held."""
        blocks = self._blocks(request.incarnation, request.keys)
        at_most = min(messages.duration_seconds(request.at_most, "at_most"), self._node.max_await_seconds)
        return pb.AwaitResponse(held=await blocks.held_within(at_most, request.keys))

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:
        """Give slots to write and lease what is held."""
        blocks = self._blocks(request.incarnation, request.keys)
        writer = messages.writer_id(request.writer_id)
        blocks.require_writer(writer)
        terms = messages.terms(request)
        lease = self._lease(blocks, request)
        reserved = blocks.reserve(lease, writer, request.keys, terms)
        return pb.ReserveResponse(
            lease_duration=duration_pb(lease.seconds),
            reserved=messages.reservations_pb(reserved.slots),
            held=messages.block_slots_pb(reserved.held),
            writing=reserved.writing,
        )

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:
        """Publish written blocks."""
        blocks = self._blocks(request.incarnation, [each.block.key for each in request.blocks])
        written = messages.written_blocks(request.blocks, block_tokens=self._node.block_tokens)
        committed = blocks.commit(request.lease_id, written)
        return pb.CommitResponse(committed=[each.key for each in committed])

    async def Abandon(self, request: pb.AbandonRequest, context: Context) -> pb.AbandonResponse:
        """Take back slots whose copies have ended."""
        blocks = self._blocks(request.incarnation, [each.block.key for each in request.blocks])
        blocks.abandon(messages.reservations(request.blocks))
        return pb.AbandonResponse()

    async def Acquire(self, request: pb.AcquireRequest, context: Context) -> pb.AcquireResponse:
        """Lease the longest held prefix."""
        blocks = self._blocks(request.incarnation, request.keys)
        need = _need(request, context)
        lease = self._lease(blocks, request)
        places = await self._node.supply(request.incarnation).acquire(lease, need)
        return pb.AcquireResponse(
            lease_duration=duration_pb(lease.seconds),
            blocks=messages.block_slots_pb(places),
            proof=self._node.prove(lease, need.namespace),
            shared=blocks.lookup(place.block.key for place in places),
        )

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        """Prolong leases."""
        blocks = self._blocks(request.incarnation)
        self._check_leases(request.lease_ids)
        alive = blocks.renew(request.lease_ids, messages.lease_seconds(request.lease_duration))
        return pb.RenewResponse(alive=alive)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        """End leases."""
        blocks = self._blocks(request.incarnation)
        self._check_leases(request.lease_ids)
        blocks.release(request.lease_ids)
        return pb.ReleaseResponse()

    async def Keep(self, request: pb.KeepRequest, context: Context) -> pb.KeepResponse:
        """Evict blocks last."""
        blocks = self._blocks(request.incarnation, request.keys)
        seconds = min(messages.duration_seconds(request.keep_for, "keep_for"), self._node.max_keep_seconds)
        kept = blocks.keep(messages.namespace(request.namespace), request.keys, seconds)
        return pb.KeepResponse(kept=kept, keep_for=duration_pb(seconds))

    async def Forget(self, request: pb.ForgetRequest, context: Context) -> pb.ForgetResponse:
        """Evict blocks first."""
        blocks = self._blocks(request.incarnation, request.keys)
        return pb.ForgetResponse(forgotten=blocks.forget(messages.namespace(request.namespace), request.keys))

    async def Promote(self, request: pb.PromoteRequest, context: Context) -> pb.PromoteResponse:
        """Bring blocks into the arena."""
        self._blocks(request.incarnation, request.keys)
        supply, namespace = self._node.supply(request.incarnation), messages.namespace(request.namespace)
        return pb.PromoteResponse(held=await supply.promote(request.keys, namespace))

    async def Read(self, request: pb.ReadRequest, context: Context) -> AsyncIterator[pb.ReadResponse]:
        """Stream leased blocks."""
        _require_deadline(context)
        blocks = self._blocks(request.incarnation, request.keys)
        blocks.require_lease(request.lease_id)
        for piece in outgoing(blocks, request.lease_id, request.keys):
            yield _piece_pb(piece)
            await asyncio.sleep(0)  # a fast reader must not keep everybody else waiting

    async def Write(self, requests: AsyncIterator[pb.WriteRequest], context: Context) -> pb.WriteResponse:
        """Take blocks from a stream."""
        _require_deadline(context)
        first = await anext(requests, pb.WriteRequest())
        blocks = self._blocks(first.incarnation)
        terms, was_open = messages.terms(first), bool(blocks.renew([first.lease_id], 0.0))
        lease = self._lease(blocks, first)
        with receiving(blocks, lease, terms, self._node.max_keys, opened=not was_open) as incoming:
            self._take(incoming, first)
            async for request in requests:
                self._take(incoming, request)
            incoming.end()
        return pb.WriteResponse(
            lease_duration=duration_pb(incoming.lease.seconds),
            committed=[messages.block_ref_pb(each) for each in incoming.committed],
            writing=incoming.writing,
        )

    async def GetStatus(self, request: pb.GetStoreStatusRequest, context: Context) -> pb.GetStoreStatusResponse:
        """Say how full the node is."""
        return status_pb(self._node)

    def _blocks(self, incarnation: str, keys: Sequence[bytes] = ()) -> Blocks:
        """The blocks of this life of the node, for a call with well-formed keys."""
        check_keys(keys, self._node.max_keys)
        return self._node.blocks(incarnation)

    def _lease(self, blocks: Blocks, request: pb.ReserveRequest | pb.AcquireRequest | pb.WriteRequest) -> Lease:
        """The lease that a call works under."""
        lease_id, seconds = check_lease_id(request.lease_id), messages.lease_seconds(request.lease_duration)
        return blocks.lease(lease_id, seconds, opens=request.opens)

    def _check_leases(self, lease_ids: Sequence[str]) -> None:
        if len(lease_ids) > self._node.max_keys:
            raise InvalidRequest(f"at most {self._node.max_keys} leases in one call", field="lease_ids")

    def _take(self, incoming: Incoming, request: pb.WriteRequest) -> None:
        if not request.data:  # a first message may only introduce the stream
            return
        seal = None
        if request.HasField("checksum"):
            messages.check_tokens(request.tokens, self._node.block_tokens)
            seal = Seal(request.checksum, request.tokens)
        incoming.take(request.key, request.data, seal)


def _require_deadline(context: Context) -> None:
    """A stream without an end could hold slots for ever."""
    if context.time_remaining() is None:
        raise InvalidRequest("a stream of blocks needs a deadline", field="deadline")


def _need(request: pb.AcquireRequest, context: Context) -> Need:
    """What a caller wants brought in, and by when. Raises InvalidRequest."""
    return Need(
        keys=tuple(request.keys),
        namespace=messages.namespace(request.namespace),
        source=messages.source(request.source) if request.HasField("source") else None,
        own_only=request.own_only,
        deadline=deadline_of(context, asyncio.get_running_loop()),
    )


def _piece_pb(piece: Piece) -> pb.ReadResponse:
    if piece.last is None:
        return pb.ReadResponse(index=piece.index, data=piece.data)
    return pb.ReadResponse(index=piece.index, data=piece.data, checksum=piece.last.checksum, tokens=piece.last.tokens)
