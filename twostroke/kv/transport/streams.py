"""gRPC streams: always work, also where the arena cannot be mapped; checksums on every block."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from twostroke import wire
from twostroke.kv import messages
from twostroke.kv.messages import PIECE_BYTES
from twostroke.kv.refs import BlockRef
from twostroke.kv.transport import Tenancy
from twostroke.kv.transport.calls import StoreCalls
from twostroke.rpc.deadline import remaining
from twostroke.v1 import kvstore_pb2 as pb

STREAM_SECONDS = 60.0


class StreamTransport:
    """Sends and receives pieces of at most 1 MiB; gRPC's flow control is the back-pressure."""

    name = "grpc"

    def __init__(self, calls: StoreCalls, rows: npt.NDArray[np.uint8]) -> None:
        self._calls = calls
        self._rows = rows

    async def write(
        self, tenancy: Tenancy, blocks: Sequence[tuple[bytes, int]], pages: Sequence[int], deadline: float | None
    ) -> list[BlockRef]:
        """See BlockTransport. What the store holds already is leased and not sent."""
        keys = [key for key, _ in blocks]
        held = await self._calls.acquire(tenancy, keys, deadline)
        missing = list(zip(blocks, pages, strict=True))[len(held) :]
        refs = [place.block for place in held]
        if not missing:
            return refs

        async def pieces() -> AsyncIterator[pb.WriteRequest]:
            yield pb.WriteRequest(
                incarnation=self._calls.node.incarnation,
                lease_id=tenancy.lease_id,
                lease_duration=wire.duration_pb(self._calls.lease_seconds),
            )
            for (key, tokens), page in missing:
                for piece in self._pieces(key, tokens, page):
                    yield piece

        with self._calls.client.calls_to(self._calls.node, tenancy.lease):
            seconds = remaining(deadline, at_most=STREAM_SECONDS)
            response = await self._calls.client.stub.Write(pieces(), timeout=seconds)
        return refs + [messages.block_ref(each) for each in response.committed]

    def _pieces(self, key: bytes, tokens: int, page: int) -> list[pb.WriteRequest]:
        row = self._rows[page]
        pieces = [
            pb.WriteRequest(data=row[start : start + PIECE_BYTES].tobytes())
            for start in range(0, row.size, PIECE_BYTES)
        ]
        pieces[0].key = key
        pieces[-1].checksum = xxhash.xxh3_64_intdigest(row.data)
        pieces[-1].tokens = tokens
        return pieces

    async def read(self, tenancy: Tenancy, keys: Sequence[bytes], pages: Sequence[int], deadline: float | None) -> int:
        """See BlockTransport. A block with a wrong checksum is a miss, and so is all after it."""
        places = await self._calls.acquire(tenancy, keys, deadline)
        whole = 0
        if not places:
            return whole
        with self._calls.client.calls_to(self._calls.node, tenancy.lease):
            keys = [place.block.key for place in places]
            request = pb.ReadRequest(incarnation=self._calls.node.incarnation, lease_id=tenancy.lease_id, keys=keys)
            call = self._calls.client.stub.Read(request, timeout=remaining(deadline, at_most=STREAM_SECONDS))
            filled = 0
            async for piece in call:
                if piece.index != whole or whole == len(places):
                    break
                row = self._rows[pages[whole]]
                data = np.frombuffer(piece.data, dtype=np.uint8)
                if filled + data.size > row.size:
                    break
                row[filled : filled + data.size] = data
                filled += data.size
                if piece.HasField("checksum"):
                    if filled != row.size or piece.checksum != xxhash.xxh3_64_intdigest(row.data):
                        break
                    whole, filled = whole + 1, 0
            call.cancel()
        return whole

    async def close(self) -> None:
        """Nothing is held."""
