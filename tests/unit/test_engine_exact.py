"""Whatever happens around a request, its tokens are those it gets alone on a fresh engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.support.engines import GREEDY, Answer, answer, asked, engine_of, prompt_of, tiny
from twostroke.engine.engine import EngineRequest
from twostroke.types import FinishReason, Priority, SamplingParams, StopConditions

LENGTHS = (1, 15, 16, 17, 31, 32, 33)
SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(seed=1),
    "top_k": SamplingParams(seed=2, temperature=0.8, top_k=20),
    "top_p": SamplingParams(seed=3, top_p=0.9),
    "min_p": SamplingParams(seed=4, temperature=1.4, min_p=0.05),
    "all": SamplingParams(seed=5, temperature=1.2, top_k=100, top_p=0.95, min_p=0.01),
    "repetition": SamplingParams(temperature=0.0, repetition_penalty=1.3),
    "repeats": SamplingParams(seed=6, presence_penalty=0.8, frequency_penalty=0.4),
    "bias": SamplingParams(seed=7, logit_bias={7: 4.0, 9: -100.0}),
    "logprobs": SamplingParams(seed=8, logprobs=3),
}


async def alone(request: EngineRequest) -> Answer:
    """The answer of a fresh engine that runs nothing else and the whole prompt at once."""
    async with engine_of(tokens_per_step=512) as engine:
        return await answer(engine, request)


def logprobs(given: Answer) -> list[tuple[float | None, ...]]:
    return [(token.logprob, *(value for _, value in token.top)) for token in given.tokens]


@pytest.mark.parametrize(
    "chunk", [{"max_chunk": 16}, {"max_chunk": 64, "tokens_per_step": 80}, {"tokens_per_step": 512}]
)
async def test_chunks_of_any_size_and_repeated_prompts_change_nothing(chunk: dict[str, int]) -> None:
    async with engine_of(**chunk) as engine:
        for length in (*LENGTHS, 500):
            request = asked(prompt_of(length, seed=length))
            expected = await alone(request)
            cold, again = await answer(engine, request), await answer(engine, request)
            assert cold.ids == again.ids == expected.ids, length
            # 11 of 12 generated tokens were run too; the last whole block of the prompt serves all but its last token.
            assert (cold.cached, again.cached) == (0, min(length - 1, length // 16 * 16))


async def test_a_shared_prefix_changes_nothing() -> None:
    async with engine_of() as engine:
        for length in (16, 17, 32, 40):
            prompt = prompt_of(40)[:length] + prompt_of(7, seed=length)
            given = await answer(engine, asked(prompt, root=b"shared"))
            assert given.ids == (await alone(asked(prompt))).ids
            assert given.cached == (0 if length == 16 else (length - 1) // 16 * 16 if length > 17 else 16)


@pytest.mark.parametrize("name", SAMPLINGS)
async def test_batch_mates_change_nothing_for_any_sampling(name: str) -> None:
    request = asked(prompt_of(33, seed=9), sampling=SAMPLINGS[name], max_tokens=20)
    expected = await alone(request)
    async with engine_of(tokens_per_step=48, max_chunk=24) as engine:
        mates = [asked(prompt_of(length, length), sampling=SAMPLINGS["seeded"]) for length in LENGTHS]
        given, *_ = await asyncio.gather(*(answer(engine, each) for each in (request, *mates)))
    assert given.ids == expected.ids
    if request.sampling.logprobs is not None:
        for ours, theirs in zip(logprobs(given), logprobs(expected), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)


async def test_greedy_text_wanders() -> None:
    """Else the other tests here would prove little."""
    assert len(set((await alone(asked(prompt_of(17), max_tokens=30))).ids)) > 8


async def test_every_request_of_a_mixed_batch_gets_its_own_answer() -> None:
    requests = [
        asked(prompt_of(length, seed), sampling=sampling)
        for seed, (length, sampling) in enumerate(zip(LENGTHS * 2, SAMPLINGS.values(), strict=False))
    ]
    async with engine_of() as engine:
        given = await asyncio.gather(*(answer(engine, request) for request in requests))
    for request, one in zip(requests, given, strict=True):
        assert one.ids == (await alone(request)).ids


async def test_preemption_changes_nothing() -> None:
    """Nine pages admit three sequences of three pages each; each ends with four."""
    requests = [asked(prompt_of(33, seed), sampling=SAMPLINGS["repeats"], max_tokens=25) for seed in range(4)]
    async with engine_of(pages=10) as engine:
        given = await asyncio.gather(*(answer(engine, request) for request in requests))
    for request, one in zip(requests, given, strict=True):
        assert one.ids == (await alone(request)).ids


async def test_giving_way_to_a_higher_class_changes_nothing() -> None:
    low = replace(asked(prompt_of(20), max_tokens=40), priority=Priority.BATCH)
    async with engine_of(max_running=1) as engine, engine.submit(low) as outputs:
        tokens = list((await anext(outputs)).tokens)
        high = await answer(engine, replace(asked(prompt_of(5), max_tokens=3), priority=Priority.INTERACTIVE))
        async for output in outputs:
            tokens += output.tokens
    assert tuple(token.id for token in tokens) == (await alone(low)).ids
    assert len(high.ids) == 3


@pytest.mark.parametrize("emitted", [1, 5, 11])
@pytest.mark.parametrize("name", ["greedy", "repeats", "repetition", "all"])
async def test_a_lost_workers_answer_is_continued_token_for_token(name: str, emitted: int) -> None:
    request = asked(prompt_of(30), sampling=SAMPLINGS[name])
    whole = (await alone(request)).ids
    async with engine_of() as engine:
        rest = await answer(engine, replace(request, emitted=whole[:emitted]))
    assert rest.ids == whole[emitted:]


async def test_a_stop_token_ends_the_answer_and_is_its_last_token() -> None:
    free = await alone(asked(prompt_of(17), max_tokens=20))
    stop = next(token for index, token in enumerate(free.ids) if index >= 4 and token not in free.ids[:index])
    stops = StopConditions(max_tokens=20, stop_token_ids=frozenset({stop}), ignore_eos=True)
    given = await alone(asked(prompt_of(17), stops=stops))
    assert given.ids == free.ids[: free.ids.index(stop) + 1]
    assert given.finish is FinishReason.STOP


async def test_stop_and_end_tokens_are_banned_before_min_tokens() -> None:
    free = await alone(asked(prompt_of(17), max_tokens=20))
    stops = StopConditions(max_tokens=20, min_tokens=6, stop_token_ids=frozenset(free.ids[:3]), ignore_eos=True)
    given = await alone(asked(prompt_of(17), stops=stops))
    assert len(given.ids) >= 6
    assert not set(given.ids[:6]) & stops.stop_token_ids


@pytest.mark.parametrize("ignore", [False, True])
async def test_the_models_own_end_token_ends_the_answer_unless_ignored(ignore: bool) -> None:
    (end,) = tiny().config.end_token_ids
    sampling = SamplingParams(temperature=0.0, logit_bias={end: 100.0})
    stops = StopConditions(max_tokens=3, ignore_eos=ignore)
    given = await alone(asked(prompt_of(4), sampling=sampling, stops=stops))
    assert given.ids == (end,) * (3 if ignore else 1)
    assert given.finish is (FinishReason.LENGTH if ignore else FinishReason.STOP)
