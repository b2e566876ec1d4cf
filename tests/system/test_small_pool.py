"""Workers whose pools are too small for the load: everything waits its turn, and nothing fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.alone import Alone
from tests.support.cluster import Shape, started, tiny_model
from tests.support.routed import Answering, Question
from twostroke.types import SamplingParams, StopConditions

PAGES = 24  # the longest answer here needs 22


async def test_fifteen_long_choices_on_workers_with_room_for_one_or_two_are_those_of_each_alone(tmp_path: Path) -> None:
    model, stops = tiny_model(tmp_path / "model"), StopConditions(max_tokens=60, ignore_eos=True)
    questions = [
        Question(
            prompt=tuple((at * at + 7 + seed) % 251 for at in range(200 + 10 * seed)),
            stops=stops,
            sampling=SamplingParams(temperature=0.8, seed=seed),
            n=1 + seed % 2,
        )
        for seed in range(10)
    ]
    async with Alone.started(model) as alone:
        truths = [await question.alone(alone) for question in questions]
        memory = PAGES * alone.engine.format.block_bytes
    # Decode computes hardly anything again: blocks that were evicted before their turn must be prefilled again.
    shape = Shape(model=model, kv_bytes=f"{memory // 1024}KiB", recompute_tokens=16, max_running=8)
    async with started(shape) as cluster:
        given = await asyncio.gather(*(Answering(question).asked(cluster.client) for question in questions))
        assert [worker.engine.load().pages for worker in cluster.workers] == [PAGES, PAGES]
    for answer, truth in zip(given, truths, strict=True):
        answer.assert_same(truth)
