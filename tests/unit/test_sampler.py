from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from twostroke.engine.filters import is_filtered, nearest, survivors
from twostroke.engine.history import TokenHistory
from twostroke.engine.sampler import Draw, sample
from twostroke.types import SamplingParams, Token


def one(row: list[float] | Tensor, *, position: int = 0, **what: Any) -> tuple[Token, ...]:
    """Sample one row; `what` are SamplingParams, except for the fields of a Draw."""
    own = {name: what.pop(name) for name in ("choices", "history", "banned") if name in what}
    draw = Draw(params=SamplingParams(**what), position=position, **own)
    (tokens,) = sample(torch.as_tensor(row, dtype=torch.float32)[None], [draw])
    assert tokens is not None
    return tokens


def greedy(row: list[float], **what: Any) -> int:
    return one(row, temperature=0.0, **what)[0].id


def test_greedy_takes_the_highest_logit_and_of_equals_the_lowest_id() -> None:
    assert greedy([0.0, 3.0, 3.0, 1.0]) == 1
    assert greedy([-math.inf, -5.0, -math.inf]) == 1


def test_the_smallest_temperature_is_greedy() -> None:
    assert one([0.0, 1.0, 0.999], temperature=5e-324)[0].id == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(bad: float, temperature: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, bad, 2.0], [5.0, 1.0, 2.0]])
    draw = Draw(params=SamplingParams(temperature=temperature, top_k=1), position=0)
    assert [tokens and tokens[0].id for tokens in sample(logits, [draw] * 3)] == [2, None, 0]


def test_a_row_without_any_token_to_choose_fails() -> None:
    draw = Draw(params=SamplingParams(temperature=0), position=0, banned=frozenset({0, 1}))
    assert sample(torch.zeros(1, 2), [draw]) == [None]


def test_the_repetition_penalty_weakens_both_signs_of_prompt_and_generated_tokens() -> None:
    history = TokenHistory(prompt=[0], generated=[1])
    (token,) = one([2.0, -1.0, 1.5, -1.5], temperature=0.0, repetition_penalty=2.0, history=history)
    assert token.id == 2  # 1, -2, 1.5, -1.5
    assert greedy([-1.0, -1.0, -1.5], repetition_penalty=2.0, history=history) == 2


def test_presence_counts_once_and_frequency_every_time_among_generated_tokens() -> None:
    history = TokenHistory(prompt=[2], generated=[0, 0, 1])
    assert greedy([3.0, 2.6, 2.0], presence_penalty=1.0, history=history) == 0  # 2.0, 1.6, 2.0
    assert greedy([3.0, 2.6, 1.5], frequency_penalty=1.0, history=history) == 1  # 1.0, 1.6, 1.5


def test_penalties_come_before_bias_and_bias_before_bans() -> None:
    history = TokenHistory(prompt=[0], generated=[])
    # Biased first, the first token would become 6 / 2; penalized first it is 2 / 2 + 4.
    assert greedy([2.0, 4.0], repetition_penalty=2.0, logit_bias={0: 4.0}, history=history) == 0
    assert greedy([2.0, 1.0], logit_bias={0: 100.0}, banned=frozenset({0})) == 1


def test_the_raw_logits_stay_as_they_are() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    params = SamplingParams(temperature=0.5, repetition_penalty=2.0, logit_bias={1: 5.0})
    draw = Draw(params=params, position=0, history=TokenHistory([0], [2]), banned=frozenset({1}))
    sample(logits, [draw])
    assert logits.tolist() == [[1.0, 2.0, 3.0]]


def test_logprobs_are_those_of_the_raw_logits_with_alternatives_in_order() -> None:
    row = [1.0, 3.0, 3.0, 0.0]
    (token,) = one(row, temperature=0.0, logprobs=3, logit_bias={3: 50.0})
    expected = torch.log_softmax(torch.tensor(row), 0).tolist()
    assert token.id == 3
    assert token.logprob == pytest.approx(expected[3], abs=1e-6)
    assert [each for each, _ in token.top] == [1, 2, 0]
    assert [value for _, value in token.top] == pytest.approx([expected[1], expected[2], expected[0]], abs=1e-6)


def test_no_alternatives_still_gives_the_token_its_logprob() -> None:
    (token,) = one([0.0, 0.0], temperature=0.0, logprobs=0)
    assert (token.id, token.top) == (0, ())
    assert token.logprob == pytest.approx(-math.log(2))


def test_more_alternatives_than_tokens_gives_them_all() -> None:
    assert len(one([0.0, 1.0], logprobs=20)[0].top) == 2


def test_the_nearest_come_in_order_and_ties_by_id() -> None:
    gaps = torch.tensor([[6.0, 2.0, 2.0, 0.0, 2.0], [0.0, 1.0, -0.0, 3.0, 0.5]])
    assert nearest(gaps, 3).tolist() == [[3, 1, 2], [0, 2, 4]]


def gaps_of(probabilities: list[float]) -> Tensor:
    logits = torch.tensor(probabilities).log()
    return (logits.max() - logits)[None]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), [1, 2]),
        (SamplingParams(top_p=0.39), [1]),
        (SamplingParams(top_p=0.41), [1, 2]),
        (SamplingParams(top_p=0.75), [1, 2, 3]),
        (SamplingParams(min_p=0.4), [1, 2, 3]),
        (SamplingParams(top_k=3, top_p=0.6), [1, 2]),  # of the mass 0.9 that top-k leaves
        (SamplingParams(top_p=0.99, min_p=0.6), [1, 2]),
        (SamplingParams(top_p=1e-9), [1]),
        (SamplingParams(top_k=99), [0, 1, 2, 3]),
        (SamplingParams(), [0, 1, 2, 3]),
    ],
)
def test_filters_keep_the_head_that_their_definitions_say(params: SamplingParams, kept: list[int]) -> None:
    assert is_filtered(params, 4) == (len(kept) < 4)
    rows, ids = survivors(gaps_of([0.1, 0.4, 0.3, 0.2]), [params])
    assert not rows.any()
    assert sorted(ids.tolist()) == kept


def test_a_flat_nucleus_larger_than_the_first_look_is_found_whole() -> None:
    _, ids = survivors(torch.zeros(1, 5000), [SamplingParams(top_p=0.5)])
    assert sorted(ids.tolist()) == list(range(2500))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_draws_follow_the_exact_distribution(params: dict[str, float]) -> None:
    """Pearson's chi-square over 4,000 seeds; the seeds are fixed, so this cannot fail by chance."""
    logits = torch.tensor([1.2, -0.3, 0.8, 0.0, 2.0, -1.0, 0.5, 1.9])
    shifted = (logits - logits.max()).double() / params.get("temperature", 1.0)
    _, ids = survivors((logits.max() - logits)[None], [SamplingParams(**params)])  # type: ignore[arg-type]
    expected = torch.zeros(8, dtype=torch.float64)
    expected[ids] = torch.softmax(shifted[ids], 0)
    draws = [Draw(params=SamplingParams(seed=seed, **params), position=5) for seed in range(4000)]  # type: ignore[arg-type]
    tokens = [drawn[0].id for drawn in sample(logits.expand(4000, 8), draws) if drawn]
    counts = torch.bincount(torch.tensor(tokens), minlength=8).double()
    assert counts[expected == 0].sum() == 0
    live = expected > 0
    statistic = float(((counts - 4000 * expected)[live] ** 2 / (4000 * expected[live])).sum())
    assert statistic < 24.3  # the 0.999 quantile for 7 degrees of freedom, an upper bound for fewer


def test_positions_and_choices_draw_independently() -> None:
    row = [0.0] * 64
    by_position = [one(row, position=position)[0].id for position in range(200)]
    by_choice = [token.id for token in one(row, choices=tuple(range(200)))]
    assert len(set(by_position)) > 50
    assert len(set(by_choice)) > 50
    assert by_position != by_choice


def test_a_choice_draws_the_same_alone_and_among_others() -> None:
    row = torch.randn(300, generator=torch.Generator().manual_seed(0))
    together = one(row, choices=(0, 1, 2, 3), seed=9)
    assert [one(row, choices=(choice,), seed=9)[0] for choice in range(4)] == list(together)
