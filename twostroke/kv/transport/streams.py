"""gRPC streams: always work, also where the arena cannot be mapped; checksums on every block."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

import numpy as np
import xxhash

from twostroke import wire
from twostroke.errors import TwostrokeError
from twostroke.kv import messages
from twostroke.kv.messages import PIECE_BYTES
from twostroke.kv.refs import BlockRef, BlockSlot
from twostroke.kv.transport import Tenancy
from twostroke.kv.transport.calls import StoreCalls
from twostroke.kv.transport.pages import Pages, Row
from twostroke.rpc.deadline import remaining
from twostroke.v1 import kvstore_pb2 as pb

log = logging.getLogger(__name__)

STREAM_SECONDS = 60.0
_BLOCKS_AT_ONCE = 8  # copied in one go between pages and messages, off the loop


class StreamTransport:
    """Sends and receives pieces of at most 1 MiB; gRPC's flow control is the back-pressure."""

    name = "grpc"

    def __init__(self, calls: StoreCalls, pages: Pages) -> None:
        self._calls = calls
        self._pages = pages

    async def write(
        self, tenancy: Tenancy, blocks: Sequence[tuple[bytes, int]], pages: Sequence[int], deadline: float | None
    ) -> list[BlockRef]:
        """See BlockTransport. What the store holds already is leased and not sent."""
        keys = [key for key, _ in blocks]
        held = await self._calls.acquire(tenancy, keys, deadline, own_only=True)
        missing = list(zip(blocks, pages, strict=True))[len(held) :]
        refs = [place.block for place in held]
        if not missing:
            return refs

        async def pieces() -> AsyncIterator[pb.WriteRequest]:
            yield pb.WriteRequest(
                incarnation=self._calls.node.incarnation,
                lease_id=tenancy.lease.id,
                lease_duration=wire.duration_pb(tenancy.lease.seconds),
                opens=not tenancy.lease.opened,
                namespace=tenancy.terms.namespace,
                transient=tenancy.terms.transient,
            )
            for start in range(0, len(missing), _BLOCKS_AT_ONCE):
                for piece in await asyncio.to_thread(self._pieces, missing[start : start + _BLOCKS_AT_ONCE]):
                    yield piece

        with self._calls.client.calls_to(self._calls.node, tenancy.lease, STREAM_SECONDS):
            seconds = remaining(deadline, at_most=STREAM_SECONDS)
            response = await self._calls.client.stub.Write(pieces(), timeout=seconds)
        tenancy.writing.update(response.writing)
        return refs + [messages.block_ref(each) for each in response.committed]

    def _pieces(self, blocks: Sequence[tuple[tuple[bytes, int], int]]) -> list[pb.WriteRequest]:
        """Cut blocks ((key, tokens), page) into messages."""
        pieces: list[pb.WriteRequest] = []

        def take(index: int, row: Row) -> None:
            first = len(pieces)
            pieces.extend(
                pb.WriteRequest(data=row[start : start + PIECE_BYTES].tobytes())
                for start in range(0, row.size, PIECE_BYTES)
            )
            pieces[first].key, pieces[-1].tokens = blocks[index][0]
            pieces[-1].checksum = xxhash.xxh3_64_intdigest(row.data)

        self._pages.read([page for _, page in blocks], take)
        return pieces

    async def read(self, tenancy: Tenancy, keys: Sequence[bytes], pages: Sequence[int], deadline: float | None) -> int:
        """See BlockTransport. A block with a wrong checksum is a miss, and so is all after it.

        Blocks that came whole before the stream failed are read.
        """
        places = await self._calls.acquire(tenancy, keys, deadline)
        if not places:
            return 0
        stored, ready = 0, list[Row]()
        try:
            async with aclosing(self._whole_blocks(tenancy, places, deadline)) as blocks:
                async for block in blocks:
                    ready.append(block)
                    if len(ready) == _BLOCKS_AT_ONCE:
                        stored, ready = stored + await self._store(pages[stored:], ready), []
        except TwostrokeError as error:
            if not stored + len(ready):
                raise
            log.warning("a read ended early", extra={"reason": error.reason, "blocks": stored + len(ready)})
        return stored + await self._store(pages[stored:], ready)

    async def _whole_blocks(
        self, tenancy: Tenancy, places: Sequence[BlockSlot], deadline: float | None
    ) -> AsyncGenerator[Row, None]:
        """Yield the blocks that come whole, up to the first that does not. Raises TwostrokeError."""
        index, block, filled = 0, self._empty(), 0
        with self._calls.client.calls_to(self._calls.node, tenancy.lease, STREAM_SECONDS):
            keys = [place.block.key for place in places]
            request = pb.ReadRequest(incarnation=self._calls.node.incarnation, lease_id=tenancy.lease.id, keys=keys)
            call = self._calls.client.stub.Read(request, timeout=remaining(deadline, at_most=STREAM_SECONDS))
            async for piece in call:
                data = np.frombuffer(piece.data, dtype=np.uint8)
                if piece.index != index or index == len(places) or filled + data.size > block.size:
                    break
                block[filled : filled + data.size] = data
                filled += data.size
                if piece.HasField("checksum"):
                    if filled != block.size or piece.checksum != xxhash.xxh3_64_intdigest(block.data):
                        break
                    yield block
                    index, block, filled = index + 1, self._empty(), 0
            call.cancel()

    def _empty(self) -> Row:
        return np.empty(self._pages.block_bytes, dtype=np.uint8)

    async def _store(self, pages: Sequence[int], blocks: Sequence[Row]) -> int:
        """Copy blocks into the first of the pages; answers how many."""

        def put(index: int, row: Row) -> bool:
            np.copyto(row, blocks[index])
            return True

        return await asyncio.to_thread(self._pages.write, pages[: len(blocks)], put)

    async def close(self) -> None:
        """Nothing is held."""
