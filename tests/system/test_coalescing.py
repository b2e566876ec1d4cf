"""Identical prompts at once: the work of one, and to each the answer that it gets alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.alone import Alone
from tests.support.cluster import Cluster, Shape, started, tiny_model
from tests.support.routed import Answering, Question, Routed
from twostroke.types import SamplingParams, StopConditions

PROMPT = tuple((at * at + 7) % 251 for at in range(2_001))
STOPS = StopConditions(max_tokens=20, ignore_eos=True)


def asking(seed: int, n: int = 1) -> Question:
    return Question(prompt=PROMPT, stops=STOPS, sampling=SamplingParams(temperature=0.9, seed=seed), n=n)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def computed(answers: list[Routed]) -> int:
    """Prompt tokens that prefill ran for them."""
    return sum(each.usage.prompt_tokens - each.usage.cached.local - each.usage.cached.store for each in answers)


async def asked(cluster: Cluster, questions: list[Question]) -> list[Routed]:
    return list(await asyncio.gather(*(Answering(each).asked(cluster.client) for each in questions)))


@pytest.mark.parametrize("chunk", [64, None])
async def test_eight_identical_prompts_answer_as_alone_for_the_work_of_one(model: Path, chunk: int | None) -> None:
    questions = [asking(seed) for seed in range(8)]
    async with Alone.started(model) as alone, started(Shape(model=model, max_chunk=chunk)) as cluster:
        truths = [await each.alone(alone) for each in questions]
        answers = await asked(cluster, questions)
        for answer, truth in zip(answers, truths, strict=True):
            answer.assert_same(truth)
        assert computed(answers) == len(PROMPT) + 7
        await cluster.settled()


async def test_four_choices_bring_each_block_to_decode_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    question = asking(5, n=4)
    async with Alone.started(model) as alone, started(Shape(model=model, max_chunk=64)) as cluster:
        pages, moved = cluster.decode[0].store._pages, []
        write = pages.write

        def counted(*where: object) -> int:
            moved.append(write(*where))  # type: ignore[arg-type]
            return moved[-1]

        monkeypatch.setattr(pages, "write", counted)
        (answer,) = await asked(cluster, [question])
        answer.assert_same(await question.alone(alone))
        assert sum(moved) == -(-len(PROMPT) // 16)


async def test_when_the_first_of_identical_prompts_is_cancelled_half_way_the_others_answer_as_alone(
    model: Path,
) -> None:
    questions = [asking(seed) for seed in range(8)]
    async with Alone.started(model) as alone, started(Shape(model=model, max_chunk=4)) as cluster:
        truths = [await each.alone(alone) for each in questions[1:]]
        engine = cluster.prefill[0].engine
        before = engine.load().steps
        leader = asyncio.create_task(Answering(questions[0]).asked(cluster.client))
        while not engine.load().running:
            await asyncio.sleep(0)
        following = [asyncio.create_task(Answering(each).asked(cluster.client)) for each in questions[1:]]
        while engine.load().waiting < 7:
            await asyncio.sleep(0)
        while engine.load().steps - before < 240:  # of 501
            await asyncio.sleep(0)
        assert engine.load().running == 1
        leader.cancel()
        answers = await asyncio.gather(*following)
        assert leader.cancelled()
        for answer, truth in zip(answers, truths, strict=True):
            answer.assert_same(truth)
        assert computed(answers) <= len(PROMPT) - 236 * 4 + 6  # what the first one had computed is not lost
        await cluster.settled()
