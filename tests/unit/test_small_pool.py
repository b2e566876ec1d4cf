"""A pool too small for its load: requests wait or give way, and each that fits alone gets the answer it gets alone."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import replace

import pytest

from tests.support.engines import Answer, answer, asked, engine_of, outputs_of, prompt_of
from tests.support.paper import PAGE_TOKENS, Desk, paper_request
from twostroke.engine.blocks import BlockPool
from twostroke.engine.engine import Engine, EngineRequest, StepOutput
from twostroke.engine.loans import PageLoans
from twostroke.errors import ContextTooLong, Internal
from twostroke.kv.keys import block_keys
from twostroke.types import Priority, SamplingParams

SEEDED = SamplingParams(seed=3, temperature=0.9, presence_penalty=0.5)


async def alone(request: EngineRequest) -> tuple[int, ...]:
    """The answer of a fresh engine with room for everything."""
    async with engine_of(tokens_per_step=512) as engine:
        return (await answer(engine, request)).ids


async def loaded(engine: Engine, other: Engine, request: EngineRequest) -> Answer:
    """Carry a prompt's blocks over from another engine, as far as there is room for them, then ask."""
    filled = StepOutput.merged(await outputs_of(other, replace(request, first_token_only=True, export=True))).filled
    pages = await engine.take_pages(len(filled))
    for page, block in zip(pages, filled, strict=False):
        engine.cache.rows()[page] = other.cache.rows()[block.page]
    other.release_pages([block.page for block in filled])
    await engine.adopt_pages([(page, b.key, b.tokens) for page, b in zip(pages, filled, strict=False)])
    return await answer(engine, request)


def preemptions(desk: Desk) -> dict[int, int]:
    """How often each sequence that ever ran gave way."""
    return {chunk.sequence.number: chunk.sequence.preemptions for step in desk.paper.steps for chunk in step.chunks}


def steps_of(desk: Desk, number: int) -> list[int]:
    """The steps in which a sequence ran."""
    return [index for index, step in enumerate(desk.chunks) if number in {chunk[0] for chunk in step}]


async def test_six_long_answers_in_a_pool_for_two_are_those_of_each_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "twostroke.engine.core")
    requests = [asked(prompt_of(20, seed), max_tokens=90, sampling=SEEDED) for seed in range(6)]
    async with engine_of(pages=15) as engine:  # each grows from two pages to seven
        given = await asyncio.gather(*(answer(engine, request) for request in requests))
    assert "request test gave way" in caplog.text
    for request, one in zip(requests, given, strict=True):
        assert one.ids == await alone(request)


def test_a_request_gives_way_at_most_once_for_each_that_came_before_it() -> None:
    desk = Desk(pages=15, max_running=6)
    prompts = [[number, 1, 2, 3, 4] for number in range(6)]
    numbers = [desk.submit(paper_request(prompt, max_tokens=40)) for prompt in prompts]
    desk.settle()
    for number, prompt in zip(numbers, prompts, strict=True):
        desk.expect(number, prompt, 40)
    gave_way = preemptions(desk)
    assert max(gave_way.values()) > 1
    assert all(gave_way[number] <= earlier for earlier, number in enumerate(numbers))


def test_who_gave_way_for_pages_comes_back_before_fresh_ones() -> None:
    desk = Desk(pages=9, max_running=2)
    old, young, fresh = (desk.submit(paper_request([n, 1, 2, 3, 4, 5, 6], max_tokens=14)) for n in (10, 20, 30))
    desk.settle()
    assert preemptions(desk) == {old: 0, young: 1, fresh: 0}
    assert steps_of(desk, young) == [*range(10), 14, 15, 16, 17]
    assert steps_of(desk, fresh)[0] == 14  # a place and its pages were there from the tenth on
    assert [number for number, *_ in desk.chunks[14]] == [young, fresh]
    for number, first in ((old, 10), (young, 20), (fresh, 30)):
        desk.expect(number, [first, 1, 2, 3, 4, 5, 6], 14)


async def test_a_request_larger_than_the_pool_is_refused_by_name_and_others_go_on() -> None:
    stream, small = asked(prompt_of(30), max_tokens=60), asked(prompt_of(40, 1))
    async with engine_of(pages=65) as engine, engine.submit(stream) as outputs:  # 1024 tokens; the context is 2048
        gathered = [await anext(outputs)]
        for length, max_tokens, field in ((1500, 12, "prompt"), (1000, 30, "max_tokens")):
            with pytest.raises(ContextTooLong, match="room for 1024") as refused:
                await answer(engine, asked(prompt_of(length), max_tokens=max_tokens))
            assert refused.value.field == field
        beside = await answer(engine, small)
        gathered += [output async for output in outputs]
    assert tuple(token.id for token in StepOutput.merged(gathered).tokens) == await alone(stream)
    assert beside.ids == await alone(small)


@pytest.mark.parametrize(
    ("pages", "warnings"), [(65, ["64 pages hold 1024 tokens; the model's context is 2048"]), (129, [])]
)
async def test_an_engine_whose_pool_is_smaller_than_the_context_says_so_when_it_starts(
    pages: int, warnings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with engine_of(pages=pages):
        pass
    assert [record.getMessage() for record in caplog.records if "context" in record.getMessage()] == warnings


async def test_requests_that_load_their_blocks_into_nine_pages_all_finish_beside_streams() -> None:
    loading = [asked(prompt_of(length, length), max_tokens=20) for length in (81, 65, 82, 66, 97, 17)]
    streams = [asked(prompt_of(10, seed), max_tokens=60) for seed in range(2)]
    async with engine_of() as other, engine_of(pages=10) as engine:
        given = await asyncio.gather(
            *(answer(engine, request) for request in streams),
            *(loaded(engine, other, request) for request in loading),
        )
    for request, one in zip([*streams, *loading], given, strict=True):
        assert one.ids == await alone(request)


def test_a_stream_to_which_loans_leave_no_page_goes_on_when_they_come_back() -> None:
    desk = Desk(pages=5)
    number = desk.submit(paper_request([1, 2, 3, 4, 5, 6], max_tokens=10))
    desk.step()
    lent = desk.core.loans.take(2)  # four pages; the stream needs all of them in the end
    desk.drain()
    assert (desk.core.load().running, desk.core.load().waiting) == (0, 1)
    desk.core.loans.give_back(lent)
    desk.settle()
    desk.expect(number, [1, 2, 3, 4, 5, 6], 10)


def test_who_waits_for_pages_gets_them_though_loading_never_ends() -> None:
    desk = Desk(pages=9)
    first = desk.submit(paper_request(list(range(10, 26)), max_tokens=4))
    desk.step()
    waiting = desk.submit(paper_request(list(range(40, 66)), max_tokens=2))  # seven of eight pages
    lent: deque[list[int]] = deque([[], []])  # each loan lasts two rounds, and there is a new one in every round
    for _ in range(8):
        desk.step()
        desk.core.loans.give_back(lent.popleft())
        lent.append(desk.core.lend_pages(2))
    desk.expect(first, list(range(10, 26)), 4)
    desk.expect(waiting, list(range(40, 66)), 2)
    for pages in lent:
        desk.core.loans.give_back(pages)
    desk.settle()


def test_loans_leave_each_running_sequence_a_page_to_grow_by() -> None:
    desk = Desk(pages=9)
    numbers = [desk.submit(paper_request([n], max_tokens=2 * PAGE_TOKENS)) for n in (1, 2)]
    desk.step()
    assert len(desk.core.lend_pages(99)) == 4  # of six
    desk.drain()
    assert preemptions(desk) == dict.fromkeys(numbers, 0)


def test_a_holder_of_pages_never_waits_for_one_that_holds_none() -> None:
    desk = Desk(pages=13)
    streams = [desk.submit(paper_request([n, 2, 3], max_tokens=14)) for n in (1, 2)]
    desk.step()
    lent = desk.core.lend_pages(3)
    big = desk.submit(paper_request(list(range(40)), max_tokens=4))
    desk.drain()
    assert [steps_of(desk, number) for number in streams] == [list(range(14))] * 2
    assert steps_of(desk, big) == []
    desk.core.loans.give_back(lent)
    desk.settle()
    desk.expect(big, list(range(40)), 4)


def test_nobody_gives_way_to_one_that_would_not_get_in_all_the_same() -> None:
    desk = Desk(pages=9, tokens_per_step=64)
    holder = desk.submit(paper_request(list(range(13)), max_tokens=3, priority=Priority.INTERACTIVE))
    low = desk.submit(paper_request(list(range(20, 29)), max_tokens=4, priority=Priority.BATCH))
    desk.step()
    high = desk.submit(paper_request(list(range(40, 57)), max_tokens=3, priority=Priority.INTERACTIVE))
    desk.settle()  # eight pages: four, three and five are wanted
    assert preemptions(desk) == {holder: 0, low: 0, high: 0}
    assert steps_of(desk, low) == [0, 1, 2, 3]
    assert steps_of(desk, high)[0] == steps_of(desk, holder)[-1] + 1


def test_one_that_gives_way_and_gets_in_again_at_once_runs_once_in_that_step() -> None:
    """It generated what another one did too; now it shares that, and needs fewer pages than it gave up."""
    desk = Desk(pages=7, tokens_per_step=64)
    prompt = list(range(5))
    twins = [desk.submit(paper_request(prompt, max_tokens=10, priority=Priority.BATCH)) for _ in range(2)]
    for _ in range(6):
        desk.step()
    high = desk.submit(paper_request(list(range(20, 25)), max_tokens=2, priority=Priority.INTERACTIVE))
    desk.step()
    assert preemptions(desk) == {twins[0]: 0, twins[1]: 1, high: 0}
    assert sorted(chunk[0] for chunk in desk.chunks[6]) == [*twins, high]
    desk.settle()
    for number in twins:
        desk.expect(number, prompt, 10)


@pytest.mark.parametrize("limits", [{}, {"max_chunk": 48}])
def test_a_prompt_of_20000_tokens_stops_no_stream_and_no_short_request(limits: dict[str, int]) -> None:
    desk = Desk(pages=5_300, context=32_768, tokens_per_step=128, **limits)
    stream = desk.submit(paper_request([1, 2, 3], max_tokens=600))
    desk.step()
    long = desk.submit(paper_request([at % 97 for at in range(20_000)], max_tokens=2))
    for _ in range(20):
        desk.step()
    short = desk.submit(paper_request(list(range(60)), max_tokens=3))
    desk.settle()
    assert steps_of(desk, stream) == list(range(600))  # a token in every step
    assert steps_of(desk, short) == [21, 22, 23]  # its whole prompt in the first step after it came
    assert len(steps_of(desk, long)) <= 20_000 // limits.get("max_chunk", 126) + 4
    desk.expect(short, list(range(60)), 3)


def test_each_prompt_leaves_half_to_those_behind_it_and_the_oldest_gets_what_is_over() -> None:
    desk = Desk(tokens_per_step=16)
    for first in (10, 40, 70):
        desk.submit(paper_request(list(range(first, first + 20))))
    desk.step()
    desk.step()
    assert desk.chunks == [[(0, 0, 10), (1, 0, 4), (2, 0, 2)], [(0, 10, 10), (1, 4, 4), (2, 2, 2)]]


async def test_a_long_prompt_a_stream_and_a_short_request_side_by_side_answer_as_alone() -> None:
    requests = [asked(prompt_of(10), max_tokens=50), asked(prompt_of(1_900, 1)), asked(prompt_of(20, 2))]
    async with engine_of() as engine:
        given = await asyncio.gather(*(answer(engine, request) for request in requests))
    for request, one in zip(requests, given, strict=True):
        assert one.ids == await alone(request)


def test_a_page_that_is_lent_twice_is_one_page_until_it_has_come_back_twice() -> None:
    loans = PageLoans(BlockPool(3))
    pages = loans.take(1)
    loans.lend(pages)
    loans.give_back(pages)
    assert loans.count == 1
    loans.give_back(pages)
    assert loans.count == 0


def test_an_idle_engine_knows_a_lost_page_from_a_lent_one() -> None:
    desk = Desk()
    lent = desk.core.lend_pages(2)
    desk.core.check_idle()
    desk.core._pool.hold(lent[:1])
    desk.core.loans.give_back(lent)
    with pytest.raises(Internal, match="1 pages are in use and 0 are lent"):
        desk.core.check_idle()


def test_loading_the_rest_of_a_prompt_never_evicts_its_head() -> None:
    desk = Desk(pages=17)
    prompt = list(range(10, 10 + 10 * PAGE_TOKENS + 1))
    request = paper_request(prompt, max_tokens=1)
    keys = block_keys(request.root, prompt, PAGE_TOKENS)
    desk.submit(request)
    desk.drain()
    desk.submit(paper_request(list(range(60, 60 + 8 * PAGE_TOKENS + 1)), max_tokens=1))  # takes the end of the first
    desk.drain()
    head = desk.core.cached_blocks(keys)
    assert 0 < head < 10
    lent = desk.core.lend_pages(10 - head, behind=keys[:head])
    assert len(lent) == 10 - head
    assert desk.core.cached_blocks(keys) == head
    assert len(desk.core.lend_pages(99, behind=keys[:head])) == 16 - 10
    assert desk.core.cached_blocks(keys) == head
