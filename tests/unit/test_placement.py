"""Laws of placement: what makes a worker better or worse, and that nothing else does."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from twostroke.cluster import WorkerLoad
from twostroke.routing.placement import Candidate, Score, rank_decode, rank_prefill

BLOCK = 16
TOKENS = st.integers(0, 5_000)
LOADS = st.builds(
    WorkerLoad,
    running=st.integers(0, 64),
    waiting=st.integers(0, 64),
    waiting_tokens=TOKENS,
    free_pages=st.integers(0, 400),
    evictable_pages=st.integers(0, 400),
)
CANDIDATES = st.builds(
    Candidate,
    worker=st.text("abcdefgh", min_size=1, max_size=4),
    load=LOADS,
    pending_tokens=TOKENS,
    open_streams=st.integers(0, 64),
    matched_tokens=TOKENS,
    last_chosen=st.integers(0, 50),
)
FLEETS = st.lists(CANDIDATES, min_size=1, max_size=6, unique_by=lambda each: each.worker)
PROMPTS = st.integers(1, 5_000)


def both(fleet: list[Candidate], prompt: int, stored: int) -> tuple[list[Score], list[Score]]:
    return rank_prefill(fleet, prompt, stored), rank_decode(fleet, prompt, BLOCK)


def total(score: list[Score]) -> float:
    return score[0].total


@given(FLEETS, PROMPTS, TOKENS)
def test_every_candidate_is_ranked_once_by_terms_that_add_up(fleet: list[Candidate], prompt: int, stored: int) -> None:
    for ranked in both(fleet, prompt, stored):
        assert sorted(score.worker for score in ranked) == sorted(each.worker for each in fleet)
        assert [score.total for score in ranked] == sorted(score.total for score in ranked)
        for score in ranked:
            assert min(score.queued, score.compute, score.load) >= 0
            assert abs(score.queued + score.compute + score.load - score.total) < 1e-6


@given(FLEETS, PROMPTS, TOKENS, st.randoms())
def test_the_order_of_the_candidates_does_not_matter(fleet: list[Candidate], prompt: int, stored: int, random) -> None:
    shuffled = fleet[:]
    random.shuffle(shuffled)
    assert both(shuffled, prompt, stored) == both(fleet, prompt, stored)


@given(FLEETS, PROMPTS, TOKENS)
def test_a_worker_is_judged_whoever_stands_beside_it(fleet: list[Candidate], prompt: int, stored: int) -> None:
    for whole, less in zip(both(fleet, prompt, stored), both(fleet[:1], prompt, stored), strict=True):
        assert less[0] in whole


@given(CANDIDATES, PROMPTS, TOKENS, TOKENS)
def test_more_cached_tokens_are_never_worse(one: Candidate, prompt: int, stored: int, more: int) -> None:
    better = replace(one, matched_tokens=one.matched_tokens + more)
    for mine, theirs in zip(both([better], prompt, stored), both([one], prompt, stored), strict=True):
        assert total(mine) <= total(theirs)


@given(CANDIDATES, PROMPTS, TOKENS, TOKENS)
def test_more_stored_tokens_never_make_prefill_dearer(one: Candidate, prompt: int, stored: int, more: int) -> None:
    assert total(rank_prefill([one], prompt, stored + more)) <= total(rank_prefill([one], prompt, stored))


@given(CANDIDATES, PROMPTS, TOKENS, st.integers(1, 1_000))
def test_more_work_is_never_better(one: Candidate, prompt: int, stored: int, more: int) -> None:
    busier = replace(
        one,
        pending_tokens=one.pending_tokens + more,
        open_streams=one.open_streams + more,
        load=replace(one.load, waiting_tokens=one.load.waiting_tokens + more, running=one.load.running + more),
    )
    for mine, theirs in zip(both([busier], prompt, stored), both([one], prompt, stored), strict=True):
        assert total(mine) > total(theirs)


@given(CANDIDATES, PROMPTS, TOKENS)
def test_work_that_a_worker_reports_already_is_not_counted_twice(one: Candidate, prompt: int, stored: int) -> None:
    reported = replace(one, pending_tokens=0, open_streams=0)
    known = replace(
        one,
        pending_tokens=one.load.waiting_tokens,
        open_streams=one.load.running + one.load.waiting,
    )
    assert both([known], prompt, stored) == both([reported], prompt, stored)


@given(st.integers(2, 5), PROMPTS, TOKENS)
def test_equals_take_turns(workers: int, prompt: int, stored: int) -> None:
    for rank in (lambda fleet: rank_prefill(fleet, prompt, stored), lambda fleet: rank_decode(fleet, prompt, BLOCK)):
        fleet = {name: Candidate(worker=name, load=WorkerLoad(free_pages=400)) for name in "abcde"[:workers]}
        turns = []
        for decision in range(1, 2 * workers + 1):
            chosen = rank(list(fleet.values()))[0].worker
            fleet[chosen] = replace(fleet[chosen], last_chosen=decision)
            turns.append(chosen)
        assert turns[:workers] == turns[workers:]
        assert len(set(turns)) == workers


def test_a_decode_worker_without_memory_for_the_prompt_comes_after_a_busier_one_with_it() -> None:
    full = Candidate(worker="full", load=WorkerLoad(running=1))
    busy = Candidate(worker="busy", load=WorkerLoad(running=20, evictable_pages=200))
    assert [score.worker for score in rank_decode([full, busy], 3_000, BLOCK)] == ["busy", "full"]


def test_a_cached_prefix_is_worth_a_wait_as_long_as_the_tokens_it_saves() -> None:
    warm = Candidate(worker="warm", load=WorkerLoad(waiting_tokens=900), matched_tokens=1_000)
    cold = Candidate(worker="cold", load=WorkerLoad())
    assert rank_prefill([warm, cold], 1_000, 0)[0].worker == "warm"
    assert rank_prefill([replace(warm, load=WorkerLoad(waiting_tokens=1_100)), cold], 1_000, 0)[0].worker == "cold"
    assert rank_prefill([warm, cold], 1_000, 1_000)[0].worker == "cold"  # the store has it: loading is cheap
