"""Calls that are left: they end at the other side too, and cost this side nothing."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from twostroke.rpc.calls import KeptCall
from twostroke.rpc.channel import connect
from twostroke.rpc.server import ServerSettings, serving
from twostroke.v1 import kvstore_pb2 as pb
from twostroke.v1 import kvstore_pb2_grpc

LEFT = 1_000  # calls, after which what is lost with each shows


class Silent(kvstore_pb2_grpc.KvStoreServiceServicer):
    """Answers nothing, or one message of a stream and no more."""

    full_name = "twostroke.v1.KvStoreService"

    def __init__(self) -> None:
        self.called = asyncio.Semaphore(0)
        self.ended = asyncio.Semaphore(0)

    def register(self, server: Any) -> None:
        kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(self, server)

    async def GetStatus(self, request: Any, context: Any) -> Any:
        await self._wait()

    async def Read(self, request: Any, context: Any) -> Any:
        yield pb.ReadResponse()
        await self._wait()

    async def _wait(self) -> None:
        self.called.release()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.release()


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Silent, Any]]:
    service = Silent()
    async with serving(ServerSettings(drain_seconds=1.0), service) as server, connect(server.address) as channel:
        yield service, kvstore_pb2_grpc.KvStoreServiceStub(channel)


async def unary(stub: Any) -> None:
    await stub.GetStatus(pb.GetStoreStatusRequest(), timeout=60)


async def streamed(stub: Any) -> None:
    async for _ in stub.Read(pb.ReadRequest(), timeout=60):
        pass


async def read(stub: Any) -> None:
    call = stub.Read(pb.ReadRequest(), timeout=60)
    while await call.read() is not grpc.aio.EOF:
        pass


WAYS = pytest.mark.parametrize("ask", [unary, streamed, read])
Ask = Callable[[Any], Awaitable[None]]


async def leave(service: Silent, stub: Any, ask: Ask) -> None:
    """Ask, and be cancelled while the answer is awaited."""
    asking = asyncio.ensure_future(ask(stub))
    await service.called.acquire()
    asking.cancel()
    await asyncio.wait({asking})
    assert asking.cancelled()
    async with asyncio.timeout(10):
        await service.ended.acquire()


def bytes_in_use() -> int:
    """Of the heap of C, in which grpc allocates."""
    names = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]
    layout = type("mallinfo2", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names]})
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        pytest.skip("this C library does not say what is in use")
    mallinfo.restype = layout
    gc.collect()
    return int(mallinfo().uordblks)


@WAYS
async def test_who_is_cancelled_ends_the_call_and_keeps_nothing_of_it(ask: Ask) -> None:
    async with served() as (service, stub):
        for _ in range(LEFT // 4):
            await leave(service, stub, ask)
        before = bytes_in_use()
        for _ in range(LEFT):
            await leave(service, stub, ask)
        assert (
            bytes_in_use() - before
        ) / LEFT < 300  # the server, in this process, loses some; a call lost up to 1,000


@WAYS
async def test_a_cancelled_call_ends_here_as_cancelled(ask: Ask) -> None:
    async with served() as (service, stub):
        call = stub.GetStatus(pb.GetStoreStatusRequest(), timeout=60) if ask is unary else stub.Read(pb.ReadRequest())

        async def answer() -> None:
            await call if ask is unary else [each async for each in call]

        asking = asyncio.ensure_future(answer())
        await service.called.acquire()
        assert call.cancel()
        await asyncio.wait({asking}, timeout=10)
        assert asking.cancelled()
        assert call.cancelled()
        assert not call.cancel()


async def test_a_failure_in_the_moment_of_the_cancellation_is_not_logged_as_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing:
        """A call of gRPC at the moment in which it fails."""

        def __init__(self) -> None:
            self.message: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def read(self) -> None:
            await self.message

        def done(self) -> bool:
            return self.message.done()

    call = Failing()
    reading = asyncio.ensure_future(KeptCall(call).read())
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # it waits for the message
    call.message.set_exception(ValueError("failed"))
    await asyncio.sleep(0)  # that has failed, and its reader has not heard of it
    reading.cancel()
    await asyncio.wait({reading})
    assert reading.cancelled()
    del call, reading
    gc.collect()
    assert not caplog.records
