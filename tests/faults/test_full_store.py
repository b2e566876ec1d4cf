"""A store without room for a prompt costs computing, never an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.alone import Alone
from tests.support.cluster import Shape, started, tiny_model
from tests.support.routed import Answering, Question
from twostroke.types import SamplingParams, StopConditions

PROMPT = tuple((at * at + 7) % 251 for at in range(1_500))


@pytest.mark.parametrize("arena_bytes", [64 << 10, 256 << 10])
async def test_every_choice_is_written_when_the_store_holds_a_part_of_the_prompt(
    tmp_path: Path, arena_bytes: int
) -> None:
    model, stops = tiny_model(tmp_path / "model"), StopConditions(max_tokens=20, ignore_eos=True)
    question = Question(prompt=PROMPT, stops=stops, sampling=SamplingParams(temperature=0.8, seed=5), n=3)
    shape = Shape(model=model, arena_bytes=arena_bytes, recompute_tokens=64)
    async with Alone.started(model) as alone, started(shape) as cluster:
        truth = await question.alone(alone)
        for _ in range(2):
            (await Answering(question).asked(cluster.client)).assert_same(truth)
            await cluster.settled()
