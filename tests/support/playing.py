"""A service of one method of each kind, over real gRPC; each does what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from google.protobuf.message import Message

from twostroke.errors import TwostrokeError
from twostroke.rpc.channel import connect
from twostroke.rpc.server import Server, ServerSettings, serving
from twostroke.rpc.status import domain_errors
from twostroke.v1 import kvstore_pb2 as pb
from twostroke.v1 import kvstore_pb2_grpc

Behaviour = Callable[[Any], Awaitable[Message]]
READY = ServerSettings(drain_seconds=5.0)
ASK = pb.GetStoreStatusRequest()


class Playing(kvstore_pb2_grpc.KvStoreServiceServicer):
    """One method of each kind; each does what the test says."""

    full_name = "twostroke.v1.KvStoreService"

    def __init__(self, behave: Behaviour) -> None:
        self.behave = behave

    def register(self, server: Any) -> None:
        kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(self, server)

    async def GetStatus(self, request: Any, context: Any) -> Any:
        return await self.behave(context)

    async def Read(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield pb.ReadResponse(index=1)
        yield await self.behave(context)

    async def Write(self, requests: Any, context: Any) -> Any:
        async for _ in requests:
            pass
        return await self.behave(context)


@asynccontextmanager
async def played(behave: Behaviour, settings: ServerSettings = READY) -> AsyncIterator[tuple[Server, Any]]:
    playing = Playing(behave)  # type: ignore[abstract]  # gRPC answers the other methods with UNIMPLEMENTED
    async with serving(settings, playing) as server, connect(server.address) as channel:
        yield server, kvstore_pb2_grpc.KvStoreServiceStub(channel)


def raising(error: Exception) -> Behaviour:
    async def behave(_: Any) -> Message:
        raise error

    return behave


class Waiting:
    """A call that says when it is in, and stays until it is let go."""

    def __init__(self) -> None:
        self.inside, self.let_go, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, _: Any) -> Message:
        self.inside.set()
        try:
            await self.let_go.wait()
        finally:
            self.left.set()
        return pb.GetStoreStatusResponse(slots=7)


async def raised(call: Awaitable[object]) -> TwostrokeError:
    with pytest.raises(TwostrokeError) as caught, domain_errors():
        await call
    return caught.value


async def chunks(*requests: Message) -> AsyncIterator[Message]:
    for request in requests:
        yield request
