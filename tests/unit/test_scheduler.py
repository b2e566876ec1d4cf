from __future__ import annotations

import pytest

from tests.support.paper import CONTEXT, PAGE_TOKENS, VOCAB, Desk, next_token, paper_request, written
from twostroke.engine.settings import EngineSettings
from twostroke.errors import BlocksMissing, ContextTooLong, Internal, InvalidRequest, Overloaded
from twostroke.kv.keys import block_key, block_keys
from twostroke.types import FinishReason, Priority

PROMPT = list(range(10, 20))


def settle(desk: Desk) -> None:
    """Run everything to its end and prove the page accounts."""
    desk.drain()
    desk.core.check_integrity()
    load = desk.core.load()
    assert not load.busy
    assert load.free_pages + load.evictable_pages + load.lent_pages == load.pages


def expect(desk: Desk, number: int, prompt: list[int], max_tokens: int) -> None:
    assert desk.tokens(number) == written(prompt, max_tokens, end=None)[0]


def chunks(desk: Desk) -> list[list[tuple[int, int, int]]]:
    """Each step's chunks as (sequence, start, count)."""
    return [[(each.sequence.number, each.start, each.count) for each in step.chunks] for step in desk.paper.steps]


def test_decodes_go_first_and_prompts_share_the_rest_of_the_budget() -> None:
    desk = Desk(tokens_per_step=8)
    desk.submit(paper_request([1, 2, 3]))
    desk.step()
    desk.submit(paper_request(list(range(20, 32))))
    desk.submit(paper_request([7, 8]))
    desk.step()
    desk.step()
    assert chunks(desk)[1:3] == [[(0, 3, 1), (1, 0, 7)], [(0, 4, 1), (1, 7, 5), (2, 0, 2)]]


def test_a_chunk_limit_lets_a_short_prompt_run_beside_a_long_one() -> None:
    desk = Desk(tokens_per_step=8, max_chunk=5)
    desk.submit(paper_request(list(range(20, 40))))
    desk.submit(paper_request([7, 8]))
    desk.step()
    assert chunks(desk) == [[(0, 0, 5), (1, 0, 2)]]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9])
def test_a_prompt_run_twice_is_found_up_to_its_last_token_and_answers_the_same(length: int) -> None:
    desk = Desk()
    prompt = PROMPT[:length]
    first = desk.submit(paper_request(prompt))
    desk.drain()
    second = desk.submit(paper_request(prompt))
    settle(desk)
    expect(desk, first, prompt, 8)
    expect(desk, second, prompt, 8)
    # Whole blocks are in the cache; the last one serves all of its tokens but the last.
    assert desk.outputs[second][0].cached == min(length - 1, length // PAGE_TOKENS * PAGE_TOKENS)


def test_a_registered_tail_is_copied_and_never_written_by_who_found_it() -> None:
    desk = Desk()
    first = desk.submit(paper_request(PROMPT, first_token_only=True, export=True))
    desk.drain()
    lent = desk.lent(first)
    shared = {page: list(desk.paper.pages[page]) for page in lent}
    token = desk.tokens(first)[0]
    second = desk.submit(paper_request(PROMPT, emitted=(token,), max_uncached=1))
    desk.drain()
    assert [token, *desk.tokens(second)] == written(PROMPT, 8, end=None)[0]
    assert desk.outputs[second][0].cached == len(PROMPT)
    assert {page: desk.paper.pages[page] for page in lent} == shared
    desk.core.loans.give_back(lent)
    settle(desk)


def test_exported_blocks_are_named_in_order_with_their_parents_and_the_tail_last() -> None:
    desk = Desk()
    number = desk.submit(paper_request(PROMPT, first_token_only=True, export=True))
    desk.drain()
    keys = block_keys(b"root", PROMPT, PAGE_TOKENS)
    filled = [block for output in desk.outputs[number] for block in output.filled]
    assert [block.key for block in filled] == [*keys, block_key(keys[-1], PROMPT[8:])]
    assert [block.parent for block in filled] == [b"root", *keys]
    assert [(block.index, block.tokens) for block in filled] == [(0, 4), (1, 4), (2, 2)]


def test_exported_pages_are_not_reused_before_they_are_given_back() -> None:
    desk = Desk(pages=6)
    first = desk.submit(paper_request(PROMPT, first_token_only=True, export=True))
    desk.drain()
    second = desk.submit(paper_request(list(range(40, 50)), max_tokens=2))
    assert not desk.step()  # three of five pages are lent
    assert desk.core.load().waiting == 1
    desk.core.loans.give_back(desk.lent(first))
    settle(desk)
    expect(desk, second, list(range(40, 50)), 2)


def test_generated_blocks_are_found_by_the_next_turn() -> None:
    desk = Desk()
    first = desk.submit(paper_request(PROMPT, max_tokens=10))
    desk.drain()
    turn = [*PROMPT, *desk.tokens(first), 1, 2]
    second = desk.submit(paper_request(turn))
    settle(desk)
    assert desk.outputs[second][0].cached == 16  # 19 of 20 tokens were run: four whole blocks
    expect(desk, second, turn, 8)


def test_a_block_is_shared_with_others_as_soon_as_its_chunk_has_run() -> None:
    desk = Desk(tokens_per_step=8)
    prompt = list(range(30, 50))
    desk.submit(paper_request(prompt))
    desk.step()
    second = desk.submit(paper_request([*prompt[:8], 1, 2]))
    settle(desk)
    assert desk.outputs[second][0].cached == 8


def test_the_youngest_gives_way_when_pages_run_out_and_still_answers_the_same() -> None:
    desk = Desk(pages=9)  # eight pages; three sequences end with four each
    prompts = [[n, n + 1, n + 2, n + 3, n + 4] for n in (10, 30, 50)]
    numbers = [desk.submit(paper_request(prompt, max_tokens=11)) for prompt in prompts]
    settle(desk)
    for number, prompt in zip(numbers, prompts, strict=True):
        expect(desk, number, prompt, 11)
    ended = [desk.paper.steps.index(step) for step in desk.paper.steps for chunk in step.chunks if chunk.start == 14]
    oldest = [index for index, step in enumerate(desk.paper.steps) if any(c.sequence.number == 0 for c in step.chunks)]
    assert oldest == list(range(len(oldest)))  # the oldest ran in every step until it was done
    assert len(ended) == 3


def test_a_higher_class_takes_the_place_of_a_strictly_lower_one_within_a_step() -> None:
    desk = Desk(max_running=2)
    low = [desk.submit(paper_request([n, n + 1], max_tokens=20, priority=Priority.BATCH)) for n in (10, 30)]
    desk.step()
    high = desk.submit(paper_request([5, 6], max_tokens=3, priority=Priority.INTERACTIVE))
    desk.step()
    assert desk.tokens(high)
    assert {chunk[0] for chunk in chunks(desk)[1]} == {low[0], high}
    settle(desk)
    expect(desk, high, [5, 6], 3)
    expect(desk, low[0], [10, 11], 20)
    expect(desk, low[1], [30, 31], 20)


def test_an_equal_class_never_gives_way_to_a_newcomer() -> None:
    desk = Desk(max_running=1)
    desk.submit(paper_request([1, 2], max_tokens=5))
    desk.step()
    desk.submit(paper_request([3, 4], max_tokens=5))
    settle(desk)
    order = [chunk[0] for step in chunks(desk) for chunk in step]
    assert order == sorted(order)


def test_a_preempted_sequence_is_readmitted_before_fresh_ones_of_its_class() -> None:
    desk = Desk(max_running=1)
    low = desk.submit(paper_request([1, 2], max_tokens=6))
    fresh = desk.submit(paper_request([3, 4], max_tokens=2))
    desk.step()
    desk.submit(paper_request([5, 6], max_tokens=2, priority=Priority.INTERACTIVE))
    settle(desk)
    order = [chunk[0] for step in chunks(desk) for chunk in step]
    assert order[-2:] == [fresh, fresh]
    expect(desk, low, [1, 2], 6)


def test_nobody_overtakes_a_request_that_waits_for_pages() -> None:
    desk = Desk(pages=9, max_running=4)
    desk.submit(paper_request(list(range(10, 27)), max_tokens=4))
    desk.step()
    big = desk.submit(paper_request(list(range(40, 60)), max_tokens=2))
    small = desk.submit(paper_request([1], max_tokens=2))
    settle(desk)
    order = [chunk[0] for step in chunks(desk) for chunk in step]
    assert order.index(big) < order.index(small)


def test_a_request_that_outgrows_the_pool_is_refused_and_a_later_one_runs() -> None:
    desk = Desk(pages=5)
    with pytest.raises(ContextTooLong) as refused:
        desk.submit(paper_request(PROMPT, max_tokens=20))
    assert refused.value.field == "max_tokens"
    with pytest.raises(ContextTooLong) as refused:
        desk.submit(paper_request(list(range(30))))
    assert refused.value.field == "prompt"
    number = desk.submit(paper_request(PROMPT, max_tokens=7))  # the last token needs no page: exactly four pages
    settle(desk)
    expect(desk, number, PROMPT, 7)


def test_a_prompt_that_leaves_no_room_in_the_context_is_refused() -> None:
    desk = Desk()
    with pytest.raises(ContextTooLong):
        desk.submit(paper_request([1] * CONTEXT))
    number = desk.submit(paper_request([1] * (CONTEXT - 1), max_tokens=50))
    settle(desk)
    assert len(desk.tokens(number)) == 1
    assert desk.finish(number) is FinishReason.LENGTH


def test_more_requests_than_may_wait_are_refused_as_overload() -> None:
    desk = Desk(max_running=1, max_waiting=2)
    kept = [desk.submit(paper_request([n])) for n in range(3)]
    refused = desk.submit(paper_request([9]))
    assert isinstance(desk.errors[refused], Overloaded)
    settle(desk)
    assert all(len(desk.tokens(number)) == 8 for number in kept)


def test_too_many_tokens_to_compute_is_refused_at_admission_and_holds_nothing() -> None:
    desk = Desk()
    refused = desk.submit(paper_request(PROMPT, max_uncached=9))
    desk.step()
    assert isinstance(desk.errors[refused], BlocksMissing)
    assert desk.core.load().free_pages == desk.core.load().pages
    allowed = desk.submit(paper_request(PROMPT, max_uncached=10))
    settle(desk)
    expect(desk, allowed, PROMPT, 8)


def test_preemption_does_not_turn_into_missing_blocks() -> None:
    desk = Desk(max_running=1)
    low = desk.submit(paper_request(PROMPT, max_uncached=10, max_tokens=8))
    for _ in range(5):
        desk.step()
    desk.submit(paper_request([5], priority=Priority.INTERACTIVE, max_tokens=2))
    desk.step()
    desk.core.loans.give_back(desk.core.loans.take(99))  # all that was cached is gone
    settle(desk)
    expect(desk, low, PROMPT, 8)


@pytest.mark.parametrize("count", [0, 1, 2, 5, 7])
def test_a_sequence_goes_on_from_tokens_emitted_elsewhere(count: int) -> None:
    desk = Desk()
    whole = written(PROMPT, 8, end=None)[0]
    number = desk.submit(paper_request(PROMPT, emitted=tuple(whole[:count])))
    settle(desk)
    assert desk.tokens(number) == whole[count:]
    assert desk.finish(number) is FinishReason.LENGTH


def test_a_sequence_that_ended_elsewhere_ends_here_without_a_step() -> None:
    desk = Desk()
    whole = written(PROMPT, 8, end=None)[0]
    full = desk.submit(paper_request(PROMPT, emitted=tuple(whole)))
    stopped = desk.submit(paper_request(PROMPT, emitted=(13,), ignore_eos=False))
    assert desk.finish(full) is FinishReason.LENGTH
    assert desk.finish(stopped) is FinishReason.STOP
    assert not desk.step()


def test_an_end_token_ends_the_sequence_and_is_reported() -> None:
    prompt = next([n, m] for n in range(VOCAB) for m in range(VOCAB) if len(written([n, m], 30)[0]) == 5)
    desk = Desk()
    number = desk.submit(paper_request(prompt, max_tokens=30, ignore_eos=False))
    settle(desk)
    assert desk.tokens(number) == written(prompt, 30)[0]
    assert desk.finish(number) is FinishReason.STOP


def test_first_tokens_come_one_per_choice_each_with_its_own_end() -> None:
    choices = tuple(range(VOCAB))[:16]
    prompt = next([n] for n in range(VOCAB) if 13 in [next_token([n], choice) for choice in choices])
    desk = Desk()
    number = desk.submit(paper_request(prompt, choices=choices, first_token_only=True, ignore_eos=False))
    settle(desk)
    (output,) = desk.outputs[number]
    assert [token.id for token in output.tokens] == [next_token(prompt, choice) for choice in choices]
    assert output.finish is None
    assert [FinishReason.STOP if token.id == 13 else None for token in output.tokens] == list(output.choices)


def test_max_tokens_of_one_is_over_with_the_first_token() -> None:
    desk = Desk()
    number = desk.submit(paper_request(PROMPT, max_tokens=1, first_token_only=True, export=True))
    desk.drain()
    assert desk.finish(number) is FinishReason.LENGTH
    desk.core.loans.give_back(desk.lent(number))
    settle(desk)


@pytest.mark.parametrize("after", range(8))
def test_cancelling_at_any_step_returns_every_page_and_twice_is_once(after: int) -> None:
    desk = Desk(pages=9, tokens_per_step=4)
    numbers = [desk.submit(paper_request([n, *PROMPT], max_tokens=6)) for n in range(3)]
    for _ in range(after):
        desk.step()
    for number in numbers:
        desk.core.cancel(number)
        desk.core.cancel(number)
    settle(desk)
    assert desk.core.load().lent_pages == 0


def test_a_step_that_raises_fails_what_is_in_it_and_nothing_else() -> None:
    desk = Desk(max_running=1)
    failing = desk.submit(paper_request(PROMPT))
    waiting = desk.submit(paper_request([1, 2, 3]))
    run, desk.paper.run = desk.paper.run, None  # type: ignore[method-assign, assignment]
    desk.step()
    desk.paper.run = run  # type: ignore[method-assign]
    assert isinstance(desk.errors[failing], Internal)
    settle(desk)
    expect(desk, waiting, [1, 2, 3], 8)


def test_the_load_counts_what_is_there() -> None:
    desk = Desk(max_running=1, tokens_per_step=4)
    desk.submit(paper_request(PROMPT))
    desk.submit(paper_request([1, 2, 3]))
    desk.step()
    load = desk.core.load()
    assert (load.running, load.waiting, load.waiting_tokens, load.steps, load.busy) == (1, 1, 9, 1, True)
    assert load.free_pages == load.pages - 3


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (paper_request([]), "prompt"),
        (paper_request([VOCAB]), "prompt"),
        (paper_request([-1]), "prompt"),
        (paper_request([1], emitted=(VOCAB,)), "emitted"),
        (paper_request([1], max_tokens=0), "max_tokens"),
        (paper_request([1], choices=(0, 1)), "n"),
        (paper_request([1], choices=()), "n"),
        (paper_request([1], max_uncached=-1), "max_uncached"),
    ],
)
def test_a_request_out_of_range_is_refused_naming_its_field(wrong: object, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Desk().submit(wrong)  # type: ignore[arg-type]
    assert refused.value.field == field


@pytest.mark.parametrize(
    "wrong",
    [{"pages": 1}, {"tokens_per_step": 0}, {"max_running": 0}, {"max_waiting": 0}, {"max_chunk": 0}, {"threads": 0}],
)
def test_settings_out_of_range_are_refused_naming_the_field(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        EngineSettings(**{"pages": 8} | wrong)


def test_every_running_sequence_must_fit_the_step() -> None:
    with pytest.raises(ValueError, match="tokens_per_step"):
        EngineSettings(pages=8, tokens_per_step=8, max_running=9)
