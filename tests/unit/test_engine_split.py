"""Prefill on one engine and decode on another give what one engine gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.engines import GREEDY, Answer, answer, asked, engine_of, outputs_of, prompt_of, split, tiny
from twostroke.engine.engine import EngineRequest, StepOutput
from twostroke.errors import BlocksMissing
from twostroke.kv.keys import block_keys
from twostroke.types import FinishReason, SamplingParams, StopConditions

SAMPLINGS = (
    GREEDY,
    SamplingParams(seed=11, temperature=1.1, top_k=50, top_p=0.95),
    SamplingParams(seed=12, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5, logprobs=2),
)


async def both_ways(request: EngineRequest) -> tuple[Answer, Answer]:
    async with engine_of() as one, engine_of() as prefill, engine_of() as decode:
        return await answer(one, request), await split(prefill, decode, request)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 500])
async def test_the_answer_is_the_same_at_every_length(length: int) -> None:
    async with engine_of() as one, engine_of() as prefill, engine_of(tokens_per_step=24) as decode:
        for sampling in SAMPLINGS:
            request = asked(prompt_of(length, seed=length), sampling=sampling)
            whole = await answer(one, request)
            for _ in range(2):  # the second time with everything cached on both sides
                parts = await split(prefill, decode, request)
                assert parts.ids == whole.ids
                assert parts.finish is whole.finish


async def test_an_end_token_as_first_token_ends_it_before_the_hand_over() -> None:
    (end,) = tiny().config.end_token_ids
    sampling = SamplingParams(temperature=0.0, logit_bias={end: 100.0})
    whole, parts = await both_ways(asked(prompt_of(20), sampling=sampling, stops=StopConditions(max_tokens=5)))
    assert parts.ids == whole.ids == (end,)
    assert parts.finish is whole.finish is FinishReason.STOP


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_max_tokens_counts_the_first_token(max_tokens: int) -> None:
    whole, parts = await both_ways(asked(prompt_of(20), max_tokens=max_tokens))
    assert len(parts.ids) == max_tokens
    assert parts.ids == whole.ids
    assert parts.finish is whole.finish is FinishReason.LENGTH


async def test_min_tokens_counts_the_first_token() -> None:
    (end,) = tiny().config.end_token_ids
    sampling = SamplingParams(temperature=0.0, logit_bias={end: 100.0})
    stops = StopConditions(max_tokens=5, min_tokens=2)
    whole, parts = await both_ways(asked(prompt_of(20), sampling=sampling, stops=stops))
    assert parts.ids == whole.ids
    assert parts.ids.index(end) == 2


async def test_a_stop_id_ends_both_at_the_same_token() -> None:
    async with engine_of() as one:
        free = (await answer(one, asked(prompt_of(20)))).ids
    for stop in free[:3]:
        stops = StopConditions(max_tokens=12, stop_token_ids=frozenset({stop}), ignore_eos=True)
        whole, parts = await both_ways(asked(prompt_of(20), stops=stops))
        assert parts.ids == whole.ids == free[: free.index(stop) + 1]
        assert parts.finish is whole.finish is FinishReason.STOP


async def test_each_choice_of_a_shared_prompt_goes_on_from_its_own_first_token() -> None:
    request = asked(prompt_of(37), sampling=SamplingParams(seed=21))
    async with engine_of() as one, engine_of() as prefill, engine_of() as decode:
        shared = replace(request, choices=(0, 1, 2), first_token_only=True, export=True)
        first = StepOutput.merged(await outputs_of(prefill, shared))
        pages = await decode.take_pages(len(first.filled))
        for page, block in zip(pages, first.filled, strict=True):
            decode.cache.rows()[page] = prefill.cache.rows()[block.page]
        prefill.release_pages([block.page for block in first.filled])
        await decode.adopt_pages([(p, b.key, b.tokens) for p, b in zip(pages, first.filled, strict=True)])
        assert first.choices == (None, None, None)
        for choice, token in enumerate(first.tokens):
            rest = await answer(decode, replace(request, choices=(choice,), emitted=(token.id,), max_uncached=1))
            whole = await answer(one, replace(request, choices=(choice,)))
            assert (token.id, *rest.ids) == whole.ids


async def test_blocks_that_were_not_carried_over_are_missing_or_computed_as_asked() -> None:
    request = asked(prompt_of(40))
    async with engine_of() as one, engine_of() as decode:
        whole = (await answer(one, request)).ids
        with pytest.raises(BlocksMissing):
            await answer(decode, replace(request, emitted=whole[:1], max_uncached=40))
        rest = await answer(decode, replace(request, emitted=whole[:1], max_uncached=41))
    assert rest.ids == whole[1:]


async def test_blocks_can_be_counted_without_being_pinned() -> None:
    request = asked(prompt_of(40), root=b"counted")
    keys = block_keys(b"counted", request.prompt, 16)
    async with engine_of() as engine:
        assert await engine.cached_blocks(keys) == 0
        await answer(engine, request)
        assert await engine.cached_blocks(keys) == 2


async def test_filled_blocks_are_reported_as_their_chunks_end_and_in_order() -> None:
    request = replace(asked(prompt_of(70)), first_token_only=True, export=True)
    async with engine_of(max_chunk=32) as engine:
        async with engine.submit(request) as outputs:
            reports = [output async for output in outputs]
        filled = [block for report in reports for block in report.filled]
        assert [block.index for block in filled] == [0, 1, 2, 3, 4]
        assert [block.tokens for block in filled] == [16, 16, 16, 16, 6]
        assert reports[-1].computed == 70
        assert engine.load().lent_pages == 5
        engine.release_pages([block.page for block in filled])


async def test_decode_reports_the_blocks_that_it_fills_too() -> None:
    request = replace(asked(prompt_of(30), max_tokens=20), export=True)
    async with engine_of() as engine:
        reports = await outputs_of(engine, request)
        filled = [block for report in reports for block in report.filled]
        assert [block.index for block in filled] == [0, 1, 2]  # 49 tokens were run
        engine.release_pages([block.page for block in filled])
