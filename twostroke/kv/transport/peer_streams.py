"""gRPC streams between nodes: the way that always works. `Read` of the source, into slots that will hold the blocks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

import xxhash

from twostroke.errors import TwostrokeError, Unavailable
from twostroke.kv.refs import BlockSlot, Offer
from twostroke.kv.transport.peer import Grant, Pulled, Seal
from twostroke.rpc.channel import connect
from twostroke.rpc.deadline import remaining
from twostroke.rpc.status import domain_errors
from twostroke.v1 import kvstore_pb2 as pb
from twostroke.v1.kvstore_pb2_grpc import KvStoreServiceStub

log = logging.getLogger(__name__)

KIND = "grpc"
STREAM_SECONDS = 60.0


class StreamPeer:
    """Reads over a channel of its own, so that blocks hold up no control call. See PeerTransport.

    Args:
        offer: the address of the source's gRPC server.
        piece_seconds: for each piece to come.
    """

    def __init__(self, offer: Offer, *, piece_seconds: float = 5.0) -> None:
        self._channel = connect(offer.address.decode(errors="replace"))
        self._stub = KvStoreServiceStub(self._channel)
        self._piece_seconds = piece_seconds

    async def read(
        self, grant: Grant, blocks: Sequence[BlockSlot], into: Sequence[memoryview], deadline: float | None
    ) -> Pulled:
        """See PeerTransport. Copies on the loop, a piece at a time: about 0.1 ms for each MiB."""
        whole: list[Seal] = []
        try:
            if blocks:
                await self._fill(grant, blocks, into, whole, deadline)
        except TwostrokeError as error:
            return Pulled(tuple(whole), error)
        return Pulled(tuple(whole))

    async def close(self) -> None:
        """See PeerTransport."""
        await self._channel.close()

    async def _fill(
        self,
        grant: Grant,
        blocks: Sequence[BlockSlot],
        into: Sequence[memoryview],
        whole: list[Seal],
        deadline: float | None,
    ) -> None:
        """Append to `whole` for each block that came whole, up to the first that did not."""
        keys = [each.block.key for each in blocks]
        request = pb.ReadRequest(incarnation=grant.lease.incarnation, lease_id=grant.lease.id, keys=keys)
        with domain_errors(lost=Unavailable):
            call = self._stub.Read(request, timeout=remaining(deadline, at_most=STREAM_SECONDS))
            try:
                pieces = aiter(call)
                while len(whole) < len(blocks):
                    seal = await self._block(pieces, len(whole), into[len(whole)])
                    if seal is None:
                        break
                    whole.append(seal)
            finally:
                call.cancel()

    async def _block(self, pieces: AsyncIterator[pb.ReadResponse], index: int, memory: memoryview) -> Seal | None:
        """Receive a block; None for one that does not come, or not whole."""
        filled = 0
        while (piece := await self._next(pieces)) is not None:
            end = filled + len(piece.data)
            if piece.index != index or end > len(memory):
                raise Unavailable("the peer's store sends what was not asked for")
            memory[filled:end] = piece.data
            filled = end
            if piece.HasField("checksum"):
                if filled == len(memory) and piece.checksum == xxhash.xxh3_64_intdigest(memory):
                    return Seal(piece.tokens, piece.checksum)
                log.warning("a block came with a wrong checksum")
                break
        return None

    async def _next(self, pieces: AsyncIterator[pb.ReadResponse]) -> pb.ReadResponse | None:
        try:
            async with asyncio.timeout(self._piece_seconds):
                return await anext(pieces, None)
        except TimeoutError as error:
            raise Unavailable("the peer's store does not answer") from error
