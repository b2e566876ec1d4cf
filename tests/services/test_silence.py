"""Long silences and long steps: connections outlive them, and everybody who asks meanwhile is answered."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.decode.service import DecodeService
from services.kvstore.service import KvStoreService
from services.prefill.service import PrefillService
from services.router.service import RouterService
from tests.support.alone import Alone
from tests.support.cluster import Shape, started, tiny_model
from tests.support.engines import steps_held
from tests.support.playing import ASK, Playing, Waiting, played
from tests.support.routed import Answering, Question
from tests.support.stores import eventually
from twostroke.rpc.channel import client_options, connect, server_options
from twostroke.types import StopConditions
from twostroke.v1 import kvstore_pb2_grpc, worker_pb2, worker_pb2_grpc
from twostroke.worker.service import WorkerService

PING_MS = 100
SERVICES = (RouterService, PrefillService, DecodeService, KvStoreService, WorkerService)
SERVING = health_pb2.HealthCheckResponse.SERVING


@asynccontextmanager
async def of_other_limits() -> AsyncIterator[str]:
    """A server with the limits that gRPC has unless told otherwise: a ping in five minutes."""
    server = grpc.aio.server()
    Playing(Waiting()).register(server)  # type: ignore[abstract]  # gRPC answers the other methods
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(grace=None)


async def test_silent_calls_and_idle_channels_outlive_pings_that_other_limits_punish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("twostroke.rpc.channel.CLIENT_OPTIONS", client_options(PING_MS))
    monkeypatch.setattr("twostroke.rpc.server.SERVER_OPTIONS", server_options(PING_MS))
    waiting = Waiting()
    async with played(waiting) as (server, stub), of_other_limits() as other, connect(server.address) as idle:
        await idle.channel_ready()
        silent = asyncio.ensure_future(stub.GetStatus(ASK, timeout=60))
        await waiting.inside.wait()
        for _ in range(4):  # each takes several pings
            async with connect(other) as channel:
                with pytest.raises(grpc.aio.AioRpcError, match="Too many pings"):
                    await kvstore_pb2_grpc.KvStoreServiceStub(channel).GetStatus(ASK, timeout=60)
        assert not silent.done()
        assert idle.get_state() is grpc.ChannelConnectivity.READY
        waiting.let_go.set()
        assert (await silent).slots == 7


@pytest.mark.parametrize("service", SERVICES)
def test_every_handler_runs_on_the_event_loop_and_can_wait(service: type[Any]) -> None:
    methods = [name for name in vars(service.__mro__[1]) if name[0].isupper()]
    assert methods
    for name in methods:
        handler = getattr(service, name)
        assert inspect.iscoroutinefunction(handler) or inspect.isasyncgenfunction(handler), name


async def test_while_a_step_takes_long_its_worker_answers_and_callers_may_leave(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    question = Question(prompt=tuple(range(100)), stops=StopConditions(max_tokens=8, ignore_eos=True))
    async with Alone.started(model) as alone, started(Shape(model=model)) as cluster:
        prefill, decode = (member.address for member in cluster.doors.fleet.members)
        with steps_held(cluster.prefill[0].engine) as go, steps_held(cluster.decode[0].engine) as on:
            asking = asyncio.create_task(Answering(question).asked(cluster.client))
            leaving = asyncio.create_task(cluster.client.complete("hello", max_tokens=8))
            await eventually(lambda: cluster.prefill[0].engine.load().busy)
            for address in (prefill, decode):
                async with connect(address) as channel:
                    health, worker = health_pb2_grpc.HealthStub(channel), worker_pb2_grpc.WorkerServiceStub(channel)
                    assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=5)).status == SERVING
                    assert (await worker.GetInfo(worker_pb2.GetInfoRequest(), timeout=5)).info.incarnation
                    reports = worker.WatchLoad(worker_pb2.WatchLoadRequest(interval_ms=10), timeout=5)
                    for _ in range(3):
                        assert isinstance(await reports.read(), worker_pb2.WatchLoadResponse)
                    reports.cancel()
            leaving.cancel()
            await asyncio.wait({leaving})
            assert not asking.done()
            go.set()
            on.set()
            (await asking).assert_same(await question.alone(alone))
