"""Families with layers of their own, through all four services: windows close over blocks that came from elsewhere."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.alone import Alone
from tests.support.cluster import Shape, started, tiny_model
from tests.support.routed import Answering, Question
from twostroke.types import SamplingParams, StopConditions

STOPS = StopConditions(max_tokens=40, ignore_eos=True)  # an answer alone is longer than a window and fills a block
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3"},
    "gemma3": {"family": "gemma3", "layers": 7, "theta": 1_000_000.0, "window": 24},  # the sixth layer sees all
}


def prompt_of(length: int) -> tuple[int, ...]:
    dice = random.Random(length)
    return tuple(dice.randrange(256) for _ in range(length))


@pytest.mark.parametrize("chunk", [16, None])
@pytest.mark.parametrize("family", FAMILIES)
async def test_two_workers_write_what_one_engine_would(tmp_path: Path, family: str, chunk: int | None) -> None:
    model = tiny_model(tmp_path / family, **FAMILIES[family])
    samplings = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, seed=5))
    async with started(Shape(model=model, max_chunk=chunk)) as cluster, Alone.started(model) as alone:
        for length in (1, 16, 23, 24, 25, 33, 300):
            for sampling in samplings:
                question = Question(prompt=prompt_of(length), sampling=sampling, stops=STOPS)
                truth = await question.alone(alone)
                for _ in ("cold", "cached"):
                    (await Answering(question).asked(cluster.client)).assert_same(truth)
