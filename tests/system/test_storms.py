"""Many callers that leave at once, while bytes or answers are on their way: all comes back, and nobody else notices."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.alone import Alone
from tests.support.cluster import SERVER, Cluster, Shape, started, tiny_model
from tests.support.faults import armed
from tests.support.routed import Answering, Question, Routed
from tests.support.stores import copies_held, copies_waiting, eventually
from twostroke.rpc.channel import connect
from twostroke.rpc.server import ServerSettings
from twostroke.types import StopConditions
from twostroke.v1 import faults_pb2

STOPS = StopConditions(max_tokens=24, ignore_eos=True)
STRUCK = ServerSettings(drain_seconds=SERVER.drain_seconds, fault_points=True)

_dice = random.Random(7)


def asking(tokens: int) -> Question:
    """About a prompt that nobody has seen."""
    return Question(prompt=tuple(_dice.randrange(256) for _ in range(tokens)), stops=STOPS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def asked(cluster: Cluster, count: int, tokens: int) -> list[asyncio.Task[Routed]]:
    return [asyncio.create_task(Answering(asking(tokens)).asked(cluster.client)) for _ in range(count)]


async def leave(tasks: Sequence[asyncio.Task[Routed]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)


async def assert_unaffected(cluster: Cluster, alone: Alone) -> None:
    """All is given back, and those who come now are answered as ever."""
    await cluster.settled()
    questions = [asking(100) for _ in range(8)]
    answers = await asyncio.gather(*(Answering(each).asked(cluster.client) for each in questions))
    for question, answer in zip(questions, answers, strict=True):
        answer.assert_same(await question.alone(alone))


async def test_fifty_callers_that_leave_while_prefill_copies_their_blocks(model: Path) -> None:
    async with Alone.started(model) as alone, started(Shape(model=model)) as cluster:
        with copies_held(cluster.prefill[0].store) as go:
            tasks = asked(cluster, 50, 40)
            await eventually(lambda: cluster.node.stats().reserved >= 100)
            await leave(tasks)
            assert cluster.node.stats().reserved >= 100  # a copy may still write there
            go.set()
        await assert_unaffected(cluster, alone)


async def test_fifty_callers_that_leave_while_decode_copies_their_blocks(model: Path) -> None:
    async with Alone.started(model) as alone, started(Shape(model=model)) as cluster:
        decode = cluster.decode[0]
        with copies_held(decode.store) as go:
            tasks = asked(cluster, 50, 40)
            await eventually(lambda: copies_waiting(decode.store) == 50)
            await leave(tasks)
            await eventually(lambda: not cluster.node.stats().leases)  # the router's hold ends at once ...
            assert decode.engine.load().lent_pages >= 100  # ... the pages' does not: a copy may still write there
            go.set()
        await assert_unaffected(cluster, alone)


async def test_a_hundred_callers_that_leave_during_prefill_cost_decode_no_step(model: Path) -> None:
    async with Alone.started(model) as alone, started(Shape(model=model, max_chunk=16)) as cluster:
        (prefill,), (decode,) = cluster.prefill, cluster.decode
        steps = decode.engine.load().steps
        with copies_held(decode.store) as go:  # what it loads ahead is on its way when they leave
            tasks = asked(cluster, 100, 3_000)
            await eventually(lambda: copies_waiting(decode.store) > 0 and prefill.engine.load().running >= 30)
            await leave(tasks)
            go.set()
        await cluster.settled()
        assert decode.engine.load().steps == steps
        await assert_unaffected(cluster, alone)


@asynccontextmanager
async def store_held(cluster: Cluster, method: str, moment: faults_pb2.Moment.ValueType) -> AsyncIterator[object]:
    """One call to the store stands still, from when it is struck to the end of the block."""
    channel = connect(cluster.kvstore)
    async with armed(channel, f"KvStoreService/{method}", moment, faults_pb2.FAULT_HOLD) as fault:
        yield fault.struck
    await channel.close()


@pytest.mark.parametrize("moment", [faults_pb2.MOMENT_CALLED, faults_pb2.MOMENT_ANSWERED], ids=["called", "answered"])
@pytest.mark.parametrize("method", ["Reserve", "Commit", "Acquire"])
async def test_leaving_while_the_store_has_not_answered_disturbs_nobody(
    model: Path, method: str, moment: faults_pb2.Moment.ValueType, caplog: pytest.LogCaptureFixture
) -> None:
    async with Alone.started(model) as alone, started(Shape(model=model, server=STRUCK)) as cluster:
        questions = [asking(100) for _ in range(6)]
        truths = [await each.alone(alone) for each in questions]
        async with store_held(cluster, method, moment) as struck:
            leaving = asyncio.create_task(Answering(asking(100)).asked(cluster.client))
            assert await struck() == 1
            others = [asyncio.create_task(Answering(each).asked(cluster.client)) for each in questions]
            await leave([leaving])
            for other, truth in zip(others, truths, strict=True):
                (await other).assert_same(truth)
        await assert_unaffected(cluster, alone)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
