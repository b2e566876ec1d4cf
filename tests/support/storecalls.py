"""The KV store's contract, spoken by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import xxhash

from tests.support.stores import KV_FORMAT, Store, key, keys, pages, serving_store
from twostroke import wire
from twostroke.errors import TwostrokeError
from twostroke.kv.filelock import LockedFile
from twostroke.kv.format import KvFormat
from twostroke.kv.layout import writer_lock_path
from twostroke.rpc.channel import connect
from twostroke.rpc.status import domain_errors
from twostroke.v1 import kvstore_pb2 as pb
from twostroke.v1.kvstore_pb2_grpc import KvStoreServiceStub

if TYPE_CHECKING:  # a name of the stubs only
    from twostroke.v1.kvstore_pb2_grpc import KvStoreServiceAsyncStub

WRITER = "writer-1"
LEASE = "0" * 32  # opened by every call that names none
TEN = wire.duration_pb(10.0)
BLOCK = pages(1)[0].tobytes()
SEAL = xxhash.xxh3_64_intdigest(BLOCK)
WIDE = dataclasses.replace(KV_FORMAT, head_dim=16_384)  # 2 MiB a block


class Caller:
    """A worker that speaks the contract by hand."""

    def __init__(self, store: Store, stub: KvStoreServiceAsyncStub) -> None:
        self.store = store
        self.stub = stub
        self.incarnation = store.node.incarnation

    async def attach(self, kv_format: KvFormat = KV_FORMAT) -> pb.AttachResponse:
        return await self.stub.Attach(pb.AttachRequest(format=wire.kv_format_pb(kv_format)), timeout=5)

    async def reserve(self, *names: int, writer: str = WRITER, lease_id: str = "") -> pb.ReserveResponse:
        request = pb.ReserveRequest(
            incarnation=self.incarnation,
            writer_id=writer,
            lease_id=lease_id or LEASE,
            opens=not lease_id,
            lease_duration=TEN,
            keys=keys(*names),
        )
        return await self.stub.Reserve(request, timeout=5)

    async def write(self, *pieces: pb.WriteRequest, lease_id: str = "") -> pb.WriteResponse:
        first = pb.WriteRequest(
            incarnation=self.incarnation, lease_id=lease_id or LEASE, opens=not lease_id, lease_duration=TEN
        )
        return await self.stub.Write(stream(first, *pieces), timeout=5)


async def stream(*requests: pb.WriteRequest) -> AsyncIterator[pb.WriteRequest]:
    for request in requests:
        yield request


@asynccontextmanager
async def calling(folder: Path, **told: object) -> AsyncIterator[Caller]:
    async with serving_store(folder, **told) as store, connect(store.address) as channel:  # type: ignore[arg-type]
        yield Caller(store, KvStoreServiceStub(channel))


@asynccontextmanager
async def writing(folder: Path, **told: object) -> AsyncIterator[Caller]:
    async with calling(folder, **told) as caller:
        attached = await caller.attach()
        with closing(LockedFile(writer_lock_path(Path(attached.arena.path), WRITER))):
            yield caller


async def refusal(kind: type[TwostrokeError], call: Awaitable[object]) -> TwostrokeError:
    with pytest.raises(kind) as refused, domain_errors():
        await call
    return refused.value


def whole(name: int, data: bytes = BLOCK, *, tokens: int = 16) -> pb.WriteRequest:
    return pb.WriteRequest(key=key(name), data=data, checksum=xxhash.xxh3_64_intdigest(data), tokens=tokens)


def piece(data: bytes = BLOCK, **fields: object) -> pb.WriteRequest:
    return pb.WriteRequest(data=data, **fields)  # type: ignore[arg-type]
