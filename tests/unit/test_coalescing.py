"""Who would compute what another one is about to fill waits for it, and for nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from torch import Tensor

from tests.support.engines import answer, asked, engine_of, prompt_of, tiny
from tests.support.paper import PAGE_TOKENS, Desk, paper_request
from twostroke.engine.attention import AttentionBackend, Plan
from twostroke.engine.models import Begun
from twostroke.engine.sequence import EngineRequest
from twostroke.errors import Internal
from twostroke.types import Priority, SamplingParams

PROMPT = list(range(10, 30))  # five blocks
LOW, HIGH = Priority.BATCH, Priority.INTERACTIVE


def computed(desk: Desk, *numbers: int) -> list[int]:
    """Tokens that each sequence ran."""
    chunks = [chunk for step in desk.chunks for chunk in step]
    return [sum(count for number, _, count in chunks if number == one) for one in numbers]


def began(desk: Desk, number: int) -> int:
    """The step in which a sequence ran first."""
    return next(at for at, step in enumerate(desk.chunks) if number in {chunk[0] for chunk in step})


def prefilled(prompt: list[int], **changes: object) -> EngineRequest:
    return replace(paper_request(prompt, first_token_only=True, export=True), **changes)


def give_back(desk: Desk, *numbers: int) -> None:
    for number in numbers:
        desk.core.loans.give_back(desk.lent(number))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 20, 30])
@pytest.mark.parametrize("chunk", [{}, {"max_chunk": 3}])
def test_of_eight_identical_cold_prompts_one_is_computed_and_each_other_runs_one_token(
    length: int, chunk: dict[str, int]
) -> None:
    desk = Desk(pages=200, max_running=16, **chunk)
    numbers = [desk.submit(prefilled(list(range(length)))) for _ in range(8)]
    desk.drain()
    give_back(desk, *numbers)
    desk.settle()
    assert computed(desk, *numbers) == [length] + [1] * 7
    assert len({tuple(desk.tokens(number)) for number in numbers}) == 1


def test_a_prompt_that_goes_on_differently_waits_for_the_shared_blocks_only() -> None:
    desk = Desk(tokens_per_step=8, max_chunk=4)
    leader = desk.submit(paper_request(PROMPT))
    follower = desk.submit(paper_request([*PROMPT[:8], 1, 2, 3]))
    desk.settle()
    assert [began(desk, leader), began(desk, follower)] == [0, 2]  # four tokens a step, eight shared
    assert computed(desk, follower) == [3 + 7]
    desk.expect(leader, PROMPT, 8)
    desk.expect(follower, [*PROMPT[:8], 1, 2, 3], 8)


def test_those_behind_one_that_waits_run_meanwhile() -> None:
    desk = Desk(tokens_per_step=8, max_chunk=4)
    _, follower, other = (desk.submit(paper_request(prompt)) for prompt in (PROMPT, PROMPT, [1, 2, 3]))
    desk.settle()
    assert began(desk, other) == 0
    assert began(desk, follower) == 5
    desk.expect(follower, PROMPT, 8)
    desk.expect(other, [1, 2, 3], 8)


@pytest.mark.parametrize("scarce", [{"max_running": 2}, {"pages": 9}])
def test_those_behind_one_that_waits_do_not_get_its_room(scarce: dict[str, int]) -> None:
    desk = Desk(tokens_per_step=8, max_chunk=4, **scarce)  # of eight pages the leader needs six, the follower two more
    leader, follower, other = (desk.submit(paper_request(p, max_tokens=4)) for p in (PROMPT, PROMPT, [1, 2, 3]))
    desk.settle()
    assert began(desk, follower) < began(desk, other)
    for number in (leader, follower):
        desk.expect(number, PROMPT, 4)


@pytest.mark.parametrize("steps", range(6))
def test_when_the_leader_leaves_the_first_follower_goes_on_from_what_there_is(steps: int) -> None:
    desk = Desk(pages=200, tokens_per_step=8, max_chunk=4, max_running=8)
    leader, *followers = [desk.submit(prefilled(PROMPT)) for _ in range(4)]
    for _ in range(steps):
        desk.step()
    desk.core.cancel(leader)
    desk.drain()
    give_back(desk, leader, *followers)
    desk.settle()
    # The last block is left to run; it is copied from whoever filled it, but for its last token.
    assert computed(desk, leader, *followers) == [steps * 4, max(20 - steps * 4, 1), 1, 1]
    assert len({tuple(desk.tokens(number)) for number in followers}) == 1


def test_when_the_leader_gives_way_to_a_higher_class_the_follower_waits_for_nobody() -> None:
    desk = Desk(max_running=1, tokens_per_step=8)
    leader, follower = [desk.submit(paper_request(PROMPT, max_tokens=3, priority=LOW)) for _ in range(2)]
    desk.step()
    high = desk.submit(paper_request([1, 2], max_tokens=3, priority=HIGH))
    desk.settle()
    assert [len(desk.tokens(number)) for number in (leader, follower, high)] == [3, 3, 3]
    assert computed(desk, leader, follower) == [20 + 2, 1 + 2]


def test_a_step_that_fails_the_leader_leaves_its_work_to_the_follower() -> None:
    desk = Desk()
    leader, follower = [desk.submit(paper_request(PROMPT)) for _ in range(2)]
    run, desk.paper.run = desk.paper.run, None  # type: ignore[method-assign, assignment]
    desk.step()
    desk.paper.run = run  # type: ignore[method-assign]
    assert isinstance(desk.errors[leader], Internal)
    desk.settle()
    desk.expect(follower, PROMPT, 8)


def test_a_higher_class_never_waits_for_a_lower_one_and_a_lower_one_does_for_a_higher() -> None:
    desk = Desk(pages=64, tokens_per_step=8, max_chunk=4)
    low = desk.submit(paper_request(PROMPT, priority=LOW))
    desk.step()
    high = desk.submit(paper_request(PROMPT, priority=HIGH))
    lower = desk.submit(paper_request(PROMPT, priority=LOW))
    desk.settle()
    assert began(desk, high) == 1
    assert began(desk, lower) > 4
    assert computed(desk, lower) == [1 + 7]
    for number in (low, high, lower):
        desk.expect(number, PROMPT, 8)


def test_what_a_caller_allows_to_be_computed_is_judged_when_the_wait_is_over() -> None:
    desk = Desk(pages=64, tokens_per_step=8)
    leader = desk.submit(paper_request(PROMPT))
    follower = desk.submit(paper_request(PROMPT, max_uncached=4))
    desk.settle()
    desk.expect(leader, PROMPT, 8)
    desk.expect(follower, PROMPT, 8)


def test_prompts_under_different_roots_wait_for_each_other_never() -> None:
    desk = Desk(pages=64, tokens_per_step=8)
    numbers = [desk.submit(replace(paper_request(PROMPT), root=root)) for root in (b"mine", b"yours")]
    desk.settle()
    assert [began(desk, number) for number in numbers] == [0, 0]


def test_blocks_that_come_from_the_store_end_the_wait() -> None:
    desk = Desk(pages=64, tokens_per_step=4)
    desk.submit(paper_request(PROMPT))
    follower = desk.submit(paper_request([*PROMPT, 1, 2]))
    desk.step()
    pages = desk.core.lend_pages(5)
    desk.paper.pages |= {page: PROMPT[at * PAGE_TOKENS :][:PAGE_TOKENS] for at, page in enumerate(pages)}
    keys = desk.core._sequences[follower].keys
    desk.core.loans.adopt([(page, key, PAGE_TOKENS) for page, key in zip(pages, keys, strict=True)])
    desk.settle()
    assert began(desk, follower) == 1
    desk.expect(follower, [*PROMPT, 1, 2], 8)


def test_a_wait_of_many_steps_is_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(pages=200, context=400, tokens_per_step=4, max_running=4, max_waiting=64)
    match, searched = desk.core._pool.match, []
    monkeypatch.setattr(desk.core._pool, "match", lambda keys: searched.append(len(keys)) or match(keys))
    numbers = [desk.submit(prefilled([at % 90 for at in range(300)])) for _ in range(20)]
    desk.drain()
    give_back(desk, *numbers)
    desk.settle()
    assert len(desk.paper.steps) > 75
    assert len(searched) < 2 * 20 + 20  # once before the wait and once behind it; and while there was no place


class Counting:
    """The tiny model, which notes how many tokens it runs."""

    def __init__(self) -> None:
        self._model = tiny().model
        self.backend, self.config = self._model.backend, self._model.config
        self.tokens = 0

    def begin(self, token_ids: Tensor, positions: Tensor) -> Begun:
        self.tokens += len(token_ids)
        return self._model.begin(token_ids, positions)

    def layers(self, begun: Begun, attention: AttentionBackend, plan: Plan) -> Tensor:
        return self._model.layers(begun, attention, plan)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


async def test_eight_identical_prompts_with_their_own_seeds_answer_as_alone_for_the_work_of_one() -> None:
    requests = [
        asked(prompt_of(500), root=b"shared", sampling=SamplingParams(temperature=0.9, seed=seed)) for seed in range(8)
    ]
    async with engine_of(tokens_per_step=512, pages=200) as engine:
        alone = [await answer(engine, replace(each, root=b"alone %d" % at)) for at, each in enumerate(requests)]
    model = Counting()
    async with engine_of(model, max_chunk=64, pages=200) as engine:
        before = model.tokens
        given = await asyncio.gather(*(answer(engine, each) for each in requests))
    assert [each.ids for each in given] == [each.ids for each in alone]
    # 31 blocks are shared, the four tokens after them are not; of twelve tokens written the last is not run.
    assert model.tokens - before == 500 + 7 * 4 + 8 * 11


async def test_an_engine_whose_leader_is_cancelled_half_way_answers_the_others() -> None:
    request = asked(prompt_of(1_500), root=b"shared")
    async with engine_of(tokens_per_step=512) as engine:
        alone = await answer(engine, replace(request, root=b"alone"))
    async with engine_of(max_chunk=16) as engine:
        leader = asyncio.create_task(answer(engine, request))
        while not engine.load().running:
            await asyncio.sleep(0)
        others = [asyncio.create_task(answer(engine, request)) for _ in range(3)]
        while engine.load().waiting < 3 or engine.load().steps < 20:
            await asyncio.sleep(0)
        leader.cancel()
        given = await asyncio.gather(*others)
        assert leader.cancelled()
    assert [each.ids for each in given] == [alone.ids] * 3
