"""The engine that clusters are held to is itself held to what a request asks for."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.alone import Alone
from tests.support.cluster import tiny_model
from tests.support.tiny import END_TOKEN
from twostroke.types import FinishReason, SamplingParams, StopConditions

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = tuple(range(40))
GREEDY = SamplingParams(temperature=0.0)
FREE = StopConditions(max_tokens=12, ignore_eos=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Alone]:
    async with Alone.started(tiny_model(tmp_path_factory.mktemp("tiny"))) as engine:
        yield engine


def seeded(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed)


async def test_the_same_seed_gives_the_same_and_another_one_something_else(alone: Alone) -> None:
    first, again, other = [await alone.answer(PROMPT, seeded(seed), FREE) for seed in (7, 7, 8)]
    assert first == again
    assert first != other


async def test_choices_differ_and_do_not_depend_on_how_many_there_are(alone: Alone) -> None:
    three = await alone.answer(PROMPT, seeded(7), FREE, n=3)
    assert len({told.ids for told in three}) == 3
    assert three[:2] == await alone.answer(PROMPT, seeded(7), FREE, n=2)
    greedy = await alone.answer(PROMPT, GREEDY, FREE, n=2)
    assert greedy[0] == greedy[1]


async def test_no_end_token_comes_before_the_least_number_of_tokens(alone: Alone) -> None:
    ends = SamplingParams(temperature=0.0, logit_bias={END_TOKEN: 100.0})
    for least in (0, 5):
        (told,) = await alone.answer(PROMPT, ends, StopConditions(max_tokens=12, min_tokens=least))
        assert (len(told.ids), told.finish) == (least + 1, FinishReason.STOP)


async def test_a_stop_string_within_the_least_number_of_tokens_is_text(alone: Alone) -> None:
    says = SamplingParams(temperature=0.0, logit_bias={ord("e"): 100.0})
    for least in (0, 5):
        stops = StopConditions(max_tokens=12, min_tokens=least)
        (told,) = await alone.answer(PROMPT, says, stops, stop_strings=("e",))
        assert (told.text, len(told.ids), told.finish) == ("e" * least, least + 1, FinishReason.STOP)


async def test_a_stop_string_that_only_the_end_completes_is_one(alone: Alone) -> None:
    half = SamplingParams(temperature=0.0, logit_bias={0xC3: 100.0})  # the first half of a character: shown at the end
    for strings, reason in (((), FinishReason.LENGTH), (("\ufffd",), FinishReason.STOP)):
        (told,) = await alone.answer(PROMPT, half, StopConditions(max_tokens=1), stop_strings=strings)
        assert (told.text, told.finish) == ("" if strings else "\ufffd", reason)
