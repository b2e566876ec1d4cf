"""A node of another host that says what is not so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from tests.support.neighbors import Host, host, read, written
from tests.support.stores import keys
from twostroke.errors import DOMAIN, Overloaded
from twostroke.kv.refs import Lease
from twostroke.rpc.channel import connect
from twostroke.rpc.status import DETAILS
from twostroke.v1 import kvstore_pb2 as pb
from twostroke.v1.kvstore_pb2_grpc import (
    KvStoreServiceServicer,
    KvStoreServiceStub,
    add_KvStoreServiceServicer_to_server,
)

NAMES = (1, 2, 3, 4, 5)


def at(address: str) -> Lease:
    return dataclasses.replace(Lease.named(5.0), incarnation="f" * 16, address=address)


class Liar(KvStoreServiceServicer):
    """Passes calls on to a true node and changes what it grants."""

    def __init__(self, address: str, change: Callable[[pb.AcquireResponse], None], refusal: bytes) -> None:
        self._stub = KvStoreServiceStub(connect(address))
        self._change = change
        self._refusal = refusal

    async def Attach(self, request: pb.AttachRequest, context: object) -> pb.AttachResponse:
        return await self._stub.Attach(request, timeout=5)

    async def Acquire(self, request: pb.AcquireRequest, context: grpc.aio.ServicerContext) -> pb.AcquireResponse:  # type: ignore[type-arg]
        if self._refusal:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no", ((DETAILS, self._refusal),))
        answer = await self._stub.Acquire(request, timeout=5)
        self._change(answer)
        return answer


async def through_liar(
    a: Host, b: Host, *, change: Callable[[pb.AcquireResponse], None] = lambda _: None, refusal: bytes = b""
) -> int:
    """Read from a by way of a liar."""
    stored, server = await written(a, *NAMES), grpc.aio.server()
    add_KvStoreServiceServicer_to_server(Liar(a.address, change, refusal), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        return await read(b, *NAMES, source=dataclasses.replace(stored.lease, address=f"127.0.0.1:{port}"))
    finally:
        await server.stop(0)


@pytest.mark.parametrize("tokens", [0, 17, 2**32 - 1])
async def test_a_block_of_a_peer_holds_as_many_tokens_as_a_block_can(tmp_path: Path, tokens: int) -> None:
    def change(answer: pb.AcquireResponse) -> None:
        for each in answer.blocks:
            each.block.tokens = tokens

    async with host(tmp_path, "a") as a, host(tmp_path, "b") as b:
        await through_liar(a, b, change=change)
        lease = b.blocks.lease("1" * 32, 5.0, opens=True)
        assert tokens not in [place.block.tokens for place in b.blocks.acquire(lease, keys(*NAMES))]


async def test_a_garbled_refusal_is_the_peers_trouble(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    status = Status(code=8, message="no")
    metadata = {"retry_after_seconds": "soon"}
    status.details.add().Pack(ErrorInfo(reason=Overloaded.reason, domain=DOMAIN, metadata=metadata))
    async with host(tmp_path, "a") as a, host(tmp_path, "b") as b:
        assert await through_liar(a, b, refusal=status.SerializeToString()) == 0
        assert b.peers.failures == 1
        assert "a fetch failed" not in [record.message for record in caplog.records]
