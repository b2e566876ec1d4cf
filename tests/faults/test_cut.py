"""Connections that break while both ends live on: nobody knows what the other has heard, and no token is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.router.assembly import assembled
from services.router.gateway.settings import GatewaySettings
from services.router.settings import DispatchSettings, RouterSettings
from tests.support.alone import Alone
from tests.support.cluster import SERVER, Cluster, Shape, started, tiny_model
from tests.support.routed import Answering, Question
from tests.support.stores import eventually
from tests.support.wires import Wire
from twostroke.client import Client
from twostroke.telemetry import Telemetry
from twostroke.types import SamplingParams, StopConditions

STOPS = StopConditions(max_tokens=150, ignore_eos=True)


@dataclass(frozen=True)
class Wired:
    """A cluster, and a router that reaches its workers over wires."""

    cluster: Cluster
    prefill: Wire
    decode: Wire
    client: Client


@asynccontextmanager
async def wired(shape: Shape) -> AsyncIterator[Wired]:
    async with started(shape) as cluster:
        prefill, decode = (member.address for member in cluster.doors.fleet.members)
        async with Wire.to(prefill) as to_prefill, Wire.to(decode) as to_decode:
            router = RouterSettings(
                prefill=(to_prefill.address,),
                decode=(to_decode.address,),
                server=SERVER,
                gateway=GatewaySettings(http_listen="127.0.0.1:0"),
                dispatch=DispatchSettings(worker_wait_seconds=10.0),
            )
            async with assembled(router, Telemetry(None)) as doors, Client(doors.grpc) as client:
                await eventually(lambda: doors.fleet.readiness is None)
                yield Wired(cluster, to_prefill, to_decode, client)


@pytest.fixture
async def whole(tmp_path: Path) -> AsyncIterator[tuple[Wired, Alone]]:
    model = tiny_model(tmp_path / "model")
    async with Alone.started(model) as alone, wired(Shape(model=model, max_chunk=16)) as system:
        yield system, alone


def asking(tokens: int, seed: int) -> Question:
    dice = random.Random(seed)
    prompt = tuple(dice.randrange(256) for _ in range(tokens))
    return Question(prompt=prompt, stops=STOPS, sampling=SamplingParams(temperature=0.8, seed=seed), n=2)


@pytest.mark.parametrize("cut", ["prefill", "decode", "both"])
@pytest.mark.parametrize("tokens", [0, 40], ids=["in the prompt", "in the answer"])
async def test_answers_go_on_though_the_connections_to_the_workers_break(
    whole: tuple[Wired, Alone], cut: str, tokens: int
) -> None:
    system, alone = whole
    questions = [asking(1_200 if not tokens else 60, seed) for seed in range(3)]
    truths = [await each.alone(alone) for each in questions]
    on_their_way = [Answering(each) for each in questions]
    engine = system.cluster.prefill[0].engine
    before = engine.load().steps
    tasks = [asyncio.create_task(each.asked(system.client)) for each in on_their_way]
    if tokens:
        await eventually(lambda: min(each.least for each in on_their_way) >= tokens)
    else:
        await eventually(lambda: engine.load().steps - before >= 20)
    assert not any(task.done() for task in tasks)
    for name, wire in (("prefill", system.prefill), ("decode", system.decode)):
        if cut in (name, "both"):
            wire.cut()
    for task, truth in zip(tasks, truths, strict=True):
        (await task).assert_same(truth)
    await system.cluster.settled()
