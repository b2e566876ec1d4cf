"""The border of every service over real gRPC: who may pass the gate, and how errors travel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from tests.support.playing import ASK, READY, Behaviour, Playing, Waiting, chunks, played, raised, raising
from twostroke.errors import (
    DOMAIN,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    NotFound,
    Overloaded,
    TooLarge,
    TwostrokeError,
    Unavailable,
    WorkerLost,
    by_reason,
)
from twostroke.rpc.channel import connect
from twostroke.rpc.gate import Gate
from twostroke.rpc.server import Server, ServerSettings, serving
from twostroke.rpc.status import DETAILS
from twostroke.v1 import kvstore_pb2 as pb
from twostroke.v1 import kvstore_pb2_grpc, worker_pb2, worker_pb2_grpc


class Informing(worker_pb2_grpc.WorkerServiceServicer):
    """What routers ask workers while those drain."""

    full_name = "twostroke.v1.WorkerService"

    def register(self, server: Any) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

    async def GetInfo(self, request: Any, context: Any) -> Any:
        return worker_pb2.GetInfoResponse()


# The gate


async def test_calls_beyond_the_limit_are_refused_and_room_comes_back() -> None:
    waiting = Waiting()
    async with played(waiting, ServerSettings(max_calls=1)) as (server, stub):
        first = stub.GetStatus(ASK, timeout=5)
        await waiting.inside.wait()
        refused = await raised(stub.GetStatus(ASK, timeout=5))
        assert (type(refused), refused.retry_after) == (Overloaded, 1.0)
        waiting.let_go.set()
        assert (await first).slots == 7
        assert (await stub.GetStatus(ASK, timeout=5)).slots == 7
        assert server.gate.open_calls == 0


async def test_a_call_inside_a_call_counts_once_and_is_no_new_work_for_a_gate_that_closes() -> None:
    gate = Gate(1)
    async with gate.entered(), gate.entered():
        assert gate.open_calls == 1
        gate.close()
        async with gate.entered():
            assert gate.open_calls == 1
        assert gate.open_calls == 1
    assert gate.open_calls == 0


async def test_a_caller_that_leaves_ends_its_call_and_makes_room() -> None:
    waiting = Waiting()
    async with played(waiting, ServerSettings(max_calls=1)) as (server, stub):
        call = stub.GetStatus(ASK, timeout=5)
        await waiting.inside.wait()
        call.cancel()
        await waiting.left.wait()
        assert await server.gate.drained(5)
        waiting.let_go.set()
        assert (await stub.GetStatus(ASK, timeout=5)).slots == 7


async def test_a_drain_refuses_new_calls_and_waits_for_open_ones() -> None:
    waiting, told = Waiting(), asyncio.Event()

    async def serve(addresses: asyncio.Queue[Server]) -> None:
        async with serving(READY, Playing(waiting), Informing()) as server:
            addresses.put_nowait(server)
            await told.wait()

    addresses: asyncio.Queue[Server] = asyncio.Queue(1)
    server_task = asyncio.create_task(serve(addresses))
    server = await addresses.get()
    async with connect(server.address) as channel:
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        call = stub.GetStatus(ASK, timeout=5)
        await waiting.inside.wait()
        told.set()
        await server.gate.wait_closed()
        assert server.gate.closed
        refused = await raised(stub.GetStatus(ASK, timeout=5))
        assert (type(refused), refused.retry_after) == (Unavailable, 1.0)
        workers = worker_pb2_grpc.WorkerServiceStub(channel)
        await workers.GetInfo(worker_pb2.GetInfoRequest(), timeout=5)  # routers still ask how we are
        assert not server_task.done()
        waiting.let_go.set()
        assert (await call).slots == 7
        await server_task


@pytest.mark.parametrize("kind", ["unary", "stream"])
async def test_a_call_that_outlasts_the_drain_ends_with_a_typed_error(kind: str) -> None:
    waiting = Waiting()
    async with impatient(waiting) as (stub, told):
        call = stub.GetStatus(ASK, timeout=10) if kind == "unary" else stub.Read(pb.ReadRequest(), timeout=10)
        if kind == "stream":
            assert (await call.read()).index == 1
        await waiting.inside.wait()
        told.set()
        ended = await raised(call if kind == "unary" else call.read())
        assert type(ended) is Unavailable  # not WorkerLost: the server itself had the last word
        assert ended.retry_after == 1.0
        assert waiting.left.is_set()


@asynccontextmanager
async def impatient(behave: Behaviour) -> AsyncIterator[tuple[Any, asyncio.Event]]:
    """A server without patience, stopped when told; its channel outlives it."""
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    told = asyncio.Event()

    async def serve() -> None:
        async with serving(ServerSettings(drain_seconds=0.0), Playing(behave)) as server:
            started.set_result(server.address)
            await told.wait()

    task = asyncio.create_task(serve())
    async with connect(await started) as channel:
        yield kvstore_pb2_grpc.KvStoreServiceStub(channel), told
        await task


async def test_a_cancelled_call_that_was_not_expelled_stays_cancelled() -> None:
    gate, inside = Gate(1), asyncio.Event()

    async def call() -> None:
        async with gate.entered():
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await inside.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert await gate.drained(0)


# Errors on the wire


@pytest.mark.parametrize("kind", by_reason().values(), ids=lambda kind: kind.reason)
@pytest.mark.parametrize("method", ["unary", "stream", "upload"])
async def test_every_error_arrives_as_it_was_raised(kind: type[TwostrokeError], method: str) -> None:
    error = kind("what happened", field="a.field", retry_after=2.5)
    async with played(raising(error)) as (_, stub):
        call = {
            "unary": lambda: stub.GetStatus(ASK, timeout=5),
            "stream": lambda: collected(stub.Read(pb.ReadRequest(), timeout=5)),
            "upload": lambda: stub.Write(chunks(pb.WriteRequest()), timeout=5),
        }[method]()
        got = await raised(call)
    assert (type(got), got.message, got.field, got.retry_after) == (kind, "what happened", "a.field", 2.5)


async def collected(stream: AsyncIterator[object]) -> list[object]:
    return [each async for each in stream]


async def test_the_status_carries_one_error_info_that_any_client_can_read() -> None:
    async with played(raising(NotFound("no such lease", field="lease_id"))) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetStatus(ASK, timeout=5)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    status = Status.FromString(dict(caught.value.trailing_metadata())[DETAILS])
    (detail,) = status.details
    info = ErrorInfo()
    assert detail.Unpack(info)
    assert (info.domain, info.reason) == (DOMAIN, "NOT_FOUND")
    assert dict(info.metadata) == {"cure": NotFound.cure, "field": "lease_id"}


@pytest.mark.parametrize("call", ["GetStatus", "Read"])
async def test_a_defect_becomes_internal_and_tells_nothing_of_its_text(call: str) -> None:
    request = ASK if call == "GetStatus" else pb.ReadRequest()
    async with played(raising(ValueError("the secret prompt"))) as (_, stub):
        made = getattr(stub, call)(request, timeout=5)
        got = await raised(made if call == "GetStatus" else collected(made))
    assert type(got) is Internal
    assert "secret" not in got.message
    assert "ValueError" in got.message


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.NOT_FOUND, NotFound),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, TooLarge),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, WorkerLost),
        (grpc.StatusCode.UNAVAILABLE, WorkerLost),
        (grpc.StatusCode.DATA_LOSS, Internal),
    ],
)
@pytest.mark.parametrize("details", [b"", b"\xff no status", "another"])
async def test_a_status_without_our_details_is_read_by_its_code(
    code: grpc.StatusCode, kind: type[TwostrokeError], details: bytes | str
) -> None:
    status = Status(code=code.value[0], message="from elsewhere")
    status.details.add().Pack(ErrorInfo(reason="OVERLOADED", domain="example.com"))
    sent = status.SerializeToString() if isinstance(details, str) else details

    async def behave(context: Any) -> Message:
        await context.abort(code, "from elsewhere", ((DETAILS, sent),))
        raise AssertionError

    async with played(behave) as (_, stub):
        got = await raised(stub.GetStatus(ASK, timeout=5))
    assert type(got) is kind
    assert "from elsewhere" in got.message
