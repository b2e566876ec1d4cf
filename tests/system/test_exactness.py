"""Disaggregation, caching, chunking and batching never change what is generated."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.alone import Alone, Told
from tests.support.cluster import Cluster, Shape, started, tiny_model
from tests.support.pairwise import all_pairs
from tests.support.routed import Answering, Question
from twostroke.types import SamplingParams, StopConditions

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 500, 3_000)
CHUNKS = (16, 64, None)
END = 258  # <|im_end|> of the tiny tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    dice = random.Random(1_000 * seed + length)
    return tuple(dice.randrange(256) for _ in range(length))


async def through_cluster(
    cluster: Cluster,
    prompt: Sequence[int],
    sampling: SamplingParams,
    stops: StopConditions,
    *,
    n: int = 1,
    stop_strings: Sequence[str] = (),
) -> list[Told]:
    """The same question, asked of the router."""
    question = Question(prompt=tuple(prompt), sampling=sampling, stops=stops, n=n, stop_strings=tuple(stop_strings))
    return (await Answering(question).asked(cluster.client)).choices


def assert_same(told: list[Told], truth: list[Told], case: object) -> None:
    for one, other in zip(told, truth, strict=True):
        assert (one.ids, one.text, one.finish) == (other.ids, other.text, other.finish), case
        for mine, theirs in zip(one.tokens, other.tokens, strict=True):
            assert (mine.logprob is None) == (theirs.logprob is None)
            if mine.logprob is not None:
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)
                assert dict(mine.top) == pytest.approx(dict(theirs.top), abs=1e-3)


@pytest.mark.parametrize("chunk", CHUNKS)
async def test_every_length_gives_the_tokens_of_one_engine_cold_and_cached(model: Path, chunk: int | None) -> None:
    stops = StopConditions(max_tokens=12, ignore_eos=True)
    async with started(Shape(model=model, max_chunk=chunk)) as cluster, Alone.started(model) as alone:
        for length in LENGTHS:
            for sampling in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, seed=length)):
                truth = await alone.answer(prompt_of(length), sampling, stops)
                for round_ in ("cold", "cached"):
                    told = await through_cluster(cluster, prompt_of(length), sampling, stops)
                    assert_same(told, truth, (length, chunk, sampling.temperature, round_))


@pytest.mark.parametrize("chunk", CHUNKS)
async def test_a_mixed_batch_gives_each_the_tokens_of_one_engine(model: Path, chunk: int | None) -> None:
    stops = StopConditions(max_tokens=24, ignore_eos=True)
    shared = prompt_of(100, seed=7)
    prompts = [prompt_of(length, seed=1) for length in LENGTHS] + [shared[:n] for n in (48, 64, 65, 99, 100)]
    samplings = [SamplingParams(temperature=0.7 * (at % 2), seed=at) for at in range(len(prompts))]
    async with (
        started(Shape(model=model, max_chunk=chunk, prefill=2, decode=2)) as cluster,
        Alone.started(model) as alone,
    ):
        truths = [await alone.answer(each, how, stops) for each, how in zip(prompts, samplings, strict=True)]
        told = await asyncio.gather(
            *(through_cluster(cluster, each, how, stops) for each, how in zip(prompts, samplings, strict=True))
        )
        for mine, truth, prompt in zip(told, truths, prompts, strict=True):
            assert_same(mine, truth, len(prompt))


async def test_every_pair_of_parameters_gives_the_tokens_of_one_engine(model: Path) -> None:
    cases = list(
        all_pairs(
            {
                "length": (1, 16, 33, 70),
                "temperature": (0.0, 0.7, 1.5),
                "top_k": (0, 1, 5),
                "top_p": (1.0, 0.6),
                "min_p": (0.0, 0.1),
                "presence_penalty": (0.0, 1.5),
                "frequency_penalty": (0.0, -1.0),
                "repetition_penalty": (1.0, 1.4),
                "logit_bias": ({}, {65: 6.0, 66: -100.0}),
                "logprobs": (None, 0, 4),
                "n": (1, 3),
                "max_tokens": (1, 2, 20),
                "min_tokens": (0, 2),
                "ignore_eos": (False, True),
                "stop_token_ids": ((), (65, 101)),
                "stop_strings": ((), ("e", "AB")),
            }
        )
    )
    async with started(Shape(model=model)) as cluster, Alone.started(model) as alone:
        for seed, case in enumerate(cases):
            sampling = SamplingParams(
                **{
                    name: case[name]
                    for name in (
                        *("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
                        *("repetition_penalty", "logit_bias", "logprobs"),
                    )
                },
                seed=seed,
            )
            stops = StopConditions(
                max_tokens=case["max_tokens"],
                min_tokens=min(case["min_tokens"], case["max_tokens"]),
                ignore_eos=case["ignore_eos"],
                stop_token_ids=frozenset(case["stop_token_ids"]),
            )
            how = {"n": case["n"], "stop_strings": case["stop_strings"]}
            truth = await alone.answer(prompt_of(case["length"], seed), sampling, stops, **how)
            told = await through_cluster(cluster, prompt_of(case["length"], seed), sampling, stops, **how)
            assert_same(told, truth, case)


async def test_all_stop_conditions_are_checked_on_the_first_token(model: Path) -> None:
    prompt, greedy = prompt_of(40), SamplingParams(temperature=0.0)
    async with started(Shape(model=model)) as cluster, Alone.started(model) as alone:
        (free,) = await alone.answer(prompt, greedy, StopConditions(max_tokens=4, ignore_eos=True))
        first = free.ids[0]
        text = bytes([first]).decode(errors="replace")
        ends = SamplingParams(temperature=0.0, logit_bias={END: 100.0})
        cases = [
            (greedy, StopConditions(max_tokens=1), ()),
            (greedy, StopConditions(max_tokens=2, ignore_eos=True), ()),
            (greedy, StopConditions(max_tokens=9, stop_token_ids=frozenset({first})), ()),
            (greedy, StopConditions(max_tokens=9, min_tokens=1, stop_token_ids=frozenset({first})), ()),
            (greedy, StopConditions(max_tokens=9), (text,)),
            (ends, StopConditions(max_tokens=9), ()),
            (ends, StopConditions(max_tokens=9, min_tokens=3), ()),
            (ends, StopConditions(max_tokens=9, ignore_eos=True), ()),
        ]
        for sampling, stops, strings in cases:
            truth = await alone.answer(prompt, sampling, stops, stop_strings=strings)
            steps = cluster.decode[0].engine.load().steps
            told = await through_cluster(cluster, prompt, sampling, stops, stop_strings=strings)
            assert_same(told, truth, (stops, strings))
            await cluster.settled()
            if len(truth[0].ids) == 1:  # finished at once: nothing was handed over
                assert cluster.decode[0].engine.load().steps == steps
