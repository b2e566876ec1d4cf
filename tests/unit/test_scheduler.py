from __future__ import annotations

import pytest

from tests.support.paper import PAGE_TOKENS, VOCAB, Desk, next_token, paper_request, written
from twostroke.errors import Internal
from twostroke.kv.keys import block_key, block_keys
from twostroke.types import FinishReason

PROMPT = list(range(10, 20))


def test_decodes_go_first_and_prompts_share_the_rest_of_the_budget() -> None:
    desk = Desk(tokens_per_step=8)
    desk.submit(paper_request([1, 2, 3]))
    desk.step()
    desk.submit(paper_request(list(range(20, 32))))
    desk.submit(paper_request([7, 8]))
    desk.step()
    desk.step()
    assert desk.chunks[1:3] == [[(0, 3, 1), (1, 0, 5), (2, 0, 2)], [(0, 4, 1), (2, 2, 1), (1, 5, 6)]]


def test_a_chunk_limit_lets_a_short_prompt_run_beside_a_long_one() -> None:
    desk = Desk(tokens_per_step=8, max_chunk=5)
    desk.submit(paper_request(list(range(20, 40))))
    desk.submit(paper_request([7, 8]))
    desk.step()
    assert desk.chunks == [[(0, 0, 5), (1, 0, 2)]]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9])
def test_a_prompt_run_twice_is_found_up_to_its_last_token_and_answers_the_same(length: int) -> None:
    desk = Desk()
    prompt = PROMPT[:length]
    first = desk.submit(paper_request(prompt))
    desk.drain()
    second = desk.submit(paper_request(prompt))
    desk.settle()
    desk.expect(first, prompt, 8)
    desk.expect(second, prompt, 8)
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
    desk.settle()


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
    desk.settle()
    desk.expect(second, list(range(40, 50)), 2)


def test_generated_blocks_are_found_by_the_next_turn() -> None:
    desk = Desk()
    first = desk.submit(paper_request(PROMPT, max_tokens=10))
    desk.drain()
    turn = [*PROMPT, *desk.tokens(first), 1, 2]
    second = desk.submit(paper_request(turn))
    desk.settle()
    assert desk.outputs[second][0].cached == 16  # 19 of 20 tokens were run: four whole blocks
    desk.expect(second, turn, 8)


def test_a_block_is_shared_with_others_as_soon_as_its_chunk_has_run() -> None:
    desk = Desk(tokens_per_step=8)
    prompt = list(range(30, 50))
    desk.submit(paper_request(prompt))
    desk.step()
    second = desk.submit(paper_request([*prompt[:8], 1, 2]))
    desk.settle()
    assert desk.outputs[second][0].cached == 8


@pytest.mark.parametrize("count", [0, 1, 2, 5, 7])
def test_a_sequence_goes_on_from_tokens_emitted_elsewhere(count: int) -> None:
    desk = Desk()
    whole = written(PROMPT, 8, end=None)[0]
    number = desk.submit(paper_request(PROMPT, emitted=tuple(whole[:count])))
    desk.settle()
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
    desk.settle()
    assert desk.tokens(number) == written(prompt, 30)[0]
    assert desk.finish(number) is FinishReason.STOP


def test_first_tokens_come_one_per_choice_each_with_its_own_end() -> None:
    choices = tuple(range(VOCAB))[:16]
    prompt = next([n] for n in range(VOCAB) if 13 in [next_token([n], choice) for choice in choices])
    desk = Desk()
    number = desk.submit(paper_request(prompt, choices=choices, first_token_only=True, ignore_eos=False))
    desk.settle()
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
    desk.settle()


@pytest.mark.parametrize("after", range(8))
def test_cancelling_at_any_step_returns_every_page_and_twice_is_once(after: int) -> None:
    desk = Desk(pages=9, tokens_per_step=4)
    numbers = [desk.submit(paper_request([n, *PROMPT], max_tokens=6)) for n in range(3)]
    for _ in range(after):
        desk.step()
    for number in numbers:
        desk.core.cancel(number)
        desk.core.cancel(number)
    desk.settle()
    assert desk.core.load().lent_pages == 0


def test_a_step_that_raises_fails_what_is_in_it_and_nothing_else() -> None:
    desk = Desk(max_running=1)
    failing = desk.submit(paper_request(PROMPT))
    waiting = desk.submit(paper_request([1, 2, 3]))
    run, desk.paper.run = desk.paper.run, None  # type: ignore[method-assign, assignment]
    desk.step()
    desk.paper.run = run  # type: ignore[method-assign]
    assert isinstance(desk.errors[failing], Internal)
    desk.settle()
    desk.expect(waiting, [1, 2, 3], 8)


def test_the_load_counts_what_is_there() -> None:
    desk = Desk(max_running=1, tokens_per_step=4)
    desk.submit(paper_request(PROMPT))
    desk.submit(paper_request([1, 2, 3]))
    desk.step()
    load = desk.core.load()
    assert (load.running, load.waiting, load.waiting_tokens, load.steps, load.busy) == (1, 1, 9, 1, True)
    assert load.free_pages == load.pages - 3
