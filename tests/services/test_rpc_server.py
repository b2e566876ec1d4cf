"""Servers and channels over real gRPC: deadlines, health, reflection, limits, keepalive, and one loop a channel."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from twostroke.errors import DeadlineExceeded, TooLarge, Unavailable, WorkerLost
from twostroke.limits import MESSAGE_BYTES
from twostroke.rpc import channel as rpc_channel
from twostroke.rpc.channel import connect
from twostroke.rpc.deadline import deadline_of, remaining
from twostroke.rpc.server import Server, ServerSettings, serving
from twostroke.rpc.status import domain_errors
from twostroke.settings import InvalidSetting
from twostroke.v1 import kvstore_pb2 as pb
from twostroke.v1 import kvstore_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
NAME = "twostroke.v1.KvStoreService"
ASK = pb.GetStoreStatusRequest()


class Answering(kvstore_pb2_grpc.KvStoreServiceServicer):
    """Answers with as many bytes as it is told."""

    full_name = NAME

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self.deadlines: list[float | None] = []

    def register(self, server: Any) -> None:
        kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(self, server)

    async def GetStatus(self, request: Any, context: Any) -> Any:
        self.deadlines.append(deadline_of(context, asyncio.get_running_loop()))
        return pb.GetStoreStatusResponse(incarnation="x" * self.size)

    async def Lookup(self, request: Any, context: Any) -> Any:
        return pb.LookupResponse(held=len(request.keys))

    async def Renew(self, request: Any, context: Any) -> Any:
        await asyncio.Event().wait()


@asynccontextmanager
async def served(size: int = 0) -> AsyncIterator[tuple[Server, Answering, Any, grpc.aio.Channel]]:
    service = Answering(size)
    async with serving(ServerSettings(drain_seconds=1.0), service) as server, connect(server.address) as channel:
        yield server, service, kvstore_pb2_grpc.KvStoreServiceStub(channel), channel


# Deadlines


async def test_the_deadline_of_a_call_is_a_point_on_the_loops_clock() -> None:
    async with served() as (_, service, stub, _channel):
        before = asyncio.get_running_loop().time()
        await stub.GetStatus(ASK, timeout=100)
        await stub.GetStatus(ASK)
    given, unlimited = service.deadlines
    assert given is not None
    assert before + 90 < given < asyncio.get_running_loop().time() + 101  # gRPC rounds on the way
    assert unlimited is None


async def test_a_call_whose_time_is_up_ends_with_a_typed_error() -> None:
    async with served() as (server, _service, stub, _channel):
        with pytest.raises(DeadlineExceeded), domain_errors():
            await stub.Renew(pb.RenewRequest(), timeout=0.05)
        assert await server.gate.drained(5)  # the server's side ended too


async def test_a_call_gets_the_time_that_is_left_and_never_more_than_its_own_bound() -> None:
    now = asyncio.get_running_loop().time()
    assert remaining(None, at_most=2.0) == 2.0
    assert remaining(now + 1_000, at_most=2.0) == 2.0
    assert 0 < remaining(now + 100, at_most=1_000) <= 100
    with pytest.raises(DeadlineExceeded):
        remaining(now - 1, at_most=2.0)


# Health and reflection


async def health_of(stub: Any, name: str) -> int:
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)).status)


async def test_health_speaks_for_the_server_and_for_each_service() -> None:
    async with served() as (server, _service, _stub, channel):
        health = health_pb2_grpc.HealthStub(channel)
        assert await health_of(health, "") == await health_of(health, NAME) == SERVING
        await server.set_ready(False)
        assert (await health_of(health, ""), await health_of(health, NAME)) == (NOT_SERVING, NOT_SERVING)
        await server.set_ready(True)
        assert await health_of(health, "") == SERVING


async def test_a_service_that_is_not_ready_serves_and_says_so() -> None:
    async with (
        serving(ServerSettings(drain_seconds=0.0), Answering(), ready=False) as server,
        connect(server.address) as channel,
    ):
        assert await health_of(health_pb2_grpc.HealthStub(channel), "") == NOT_SERVING
        await kvstore_pb2_grpc.KvStoreServiceStub(channel).GetStatus(ASK, timeout=5)


async def test_a_balancer_that_watches_learns_of_the_drain_and_does_not_hold_it_up() -> None:
    async with asyncio.timeout(30):
        async with serving(ServerSettings(drain_seconds=20.0), Answering()) as server:
            channel = connect(server.address)
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == SERVING
        assert (await watch.read()).status == NOT_SERVING
        await channel.close()


async def test_reflection_names_every_service() -> None:
    async with served() as (_server, _service, _stub, channel):
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=5)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        await call.done_writing()
        answer = await call.read()
        names = {each.name for each in answer.list_services_response.service}
        assert names >= {NAME, "grpc.health.v1.Health"}
        assert await call.read() is grpc.aio.EOF


# Limits and keepalive


async def test_a_request_over_the_limit_is_refused_by_type_and_the_channel_goes_on() -> None:
    async with served() as (_server, _service, stub, _channel):
        with pytest.raises(TooLarge), domain_errors():
            await stub.Lookup(pb.LookupRequest(keys=[bytes(MESSAGE_BYTES)]), timeout=20)
        assert (await stub.Lookup(pb.LookupRequest(keys=[b""]), timeout=5)).held == 1


async def test_a_request_over_the_limit_is_refused_by_the_server_too() -> None:
    unlimited = [("grpc.max_send_message_length", -1)]
    async with (
        served() as (server, _service, _stub, _own),
        grpc.aio.insecure_channel(server.address, options=unlimited) as channel,
    ):
        stub: Any = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        with pytest.raises(TooLarge), domain_errors():
            await stub.Lookup(pb.LookupRequest(keys=[bytes(MESSAGE_BYTES)]), timeout=20)


async def test_an_answer_over_the_limit_is_refused_by_type() -> None:
    async with served(MESSAGE_BYTES) as (_server, _service, stub, _channel):
        with pytest.raises(TooLarge), domain_errors():
            await stub.GetStatus(ASK, timeout=20)


async def test_a_message_of_almost_the_limit_passes_both_ways() -> None:
    async with served(MESSAGE_BYTES - 64) as (_server, _service, stub, _channel):
        assert len((await stub.GetStatus(ASK, timeout=20)).incarnation) == MESSAGE_BYTES - 64
        keys = [bytes(MESSAGE_BYTES - 64)]
        assert (await stub.Lookup(pb.LookupRequest(keys=keys), timeout=20)).held == 1


def test_clients_never_ping_more_often_than_servers_allow() -> None:
    client, server = dict(rpc_channel.CLIENT_OPTIONS), dict(rpc_channel.SERVER_OPTIONS)
    assert client["grpc.keepalive_time_ms"] > server["grpc.http2.min_ping_interval_without_data_ms"]
    for name in ("keepalive_permit_without_calls", "max_receive_message_length", "max_send_message_length"):
        assert client[f"grpc.{name}"] == server[f"grpc.{name}"]
    assert client["grpc.http2.max_pings_without_data"] == 0  # silent calls are pinged for as long as they last


# What gRPC logs


async def test_an_answer_that_meets_the_end_of_its_call_is_no_defect_and_everything_else_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    grpc_log, said = logging.getLogger("grpc._cython.cygrpc"), "ExecuteBatchError raised in core by servicer method [x]"
    defects = [
        cygrpc.ExecuteBatchError("Failed grpc_call_start_batch: 8 with grpc_call_error value: 'TOO_MANY_OPERATIONS'"),
        cygrpc.InternalError('Failed "execute_batch": ()'),
        ValueError("a defect of ours"),
    ]
    async with served():
        grpc_log.error(said, exc_info=cygrpc.ExecuteBatchError('Failed "execute_batch": (SendMessage,)'))
        assert not caplog.records
        for defect in defects:
            grpc_log.error(said, exc_info=defect)
        grpc_log.error("without an exception")
    assert [record.exc_info and record.exc_info[1] for record in caplog.records] == [*defects, None]


# Channels


async def test_an_empty_address_is_refused_at_once() -> None:
    with pytest.raises(Unavailable):
        connect("")


async def test_nobody_there_means_that_the_worker_is_lost_unless_said_otherwise() -> None:
    async with served() as (server, _service, _stub, _channel):
        address = server.address
    async with connect(address) as channel:
        stub: Any = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        with pytest.raises(WorkerLost), domain_errors():
            await stub.GetStatus(ASK, timeout=5)
        with pytest.raises(Unavailable) as refused, domain_errors(lost=Unavailable):
            await stub.GetStatus(ASK, timeout=5)
        assert type(refused.value) is Unavailable


async def test_a_closed_channel_is_unavailable() -> None:
    async with served() as (_server, _service, stub, channel):
        await channel.close()
        with pytest.raises(Unavailable), domain_errors():
            await stub.GetStatus(ASK, timeout=5)


@pytest.mark.parametrize("method", ["Lookup", "Read", "Write"])
async def test_a_channel_refuses_calls_from_another_loop(method: str) -> None:
    found: list[BaseException] = []

    async def call(stub: Any) -> None:
        getattr(stub, method)({"Lookup": pb.LookupRequest(), "Read": pb.ReadRequest(), "Write": None}[method])

    def elsewhere(stub: Any) -> None:
        try:
            asyncio.run(call(stub))
        except RuntimeError as error:
            found.append(error)

    async with served() as (_server, _service, stub, _channel):
        thread = threading.Thread(target=elsewhere, args=(stub,))
        thread.start()
        await asyncio.to_thread(thread.join)
        assert "another event loop" in str(found[0])
        assert (await stub.Lookup(pb.LookupRequest(), timeout=5)).held == 0


async def test_a_port_that_is_taken_is_an_error_and_not_a_silent_share() -> None:
    async with served() as (server, _service, _stub, _channel):
        with pytest.raises(Unavailable, match="cannot listen on"):
            async with serving(ServerSettings(listen=server.address), Answering()):
                pass


@pytest.mark.parametrize(
    "wrong", [{"listen": "8000"}, {"listen": "host:99999"}, {"max_calls": 0}, {"drain_seconds": -1.0}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        ServerSettings(**wrong)
