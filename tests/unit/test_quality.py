"""The numbers of `twostroke eval` against formulas written out, one token at a time."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twostroke.engine.quality import Tally, likeness
from twostroke.errors import InvalidRequest, ModelError

Scores = npt.NDArray[np.float32]


def pair(tokens: int, seed: int, apart: float = 0.5) -> tuple[Scores, Scores, npt.NDArray[np.int64]]:
    """Logits of a reference and of another, and the tokens that came; a vocabulary of 11."""
    random = np.random.default_rng(seed)
    reference = (3 * random.standard_normal((tokens, 11))).astype(np.float32)
    other = (reference + apart * random.standard_normal((tokens, 11))).astype(np.float32)
    return reference, other, random.integers(0, 11, tokens)


def tally(reference: Scores, other: Scores, targets: npt.NDArray[np.int64], *cuts: int) -> Tally:
    made = Tally()
    for parts in zip(*(np.split(each, sorted(cuts)) for each in (reference, other, targets)), strict=True):
        made.add(*map(torch.from_numpy, parts))
    return made


def log_probabilities(row: Scores) -> list[float]:
    total = math.log(math.fsum(math.exp(float(score)) for score in row))
    return [float(score) - total for score in row]


@given(st.integers(2, 250), st.integers(0, 1 << 30))
def test_every_number_is_that_of_its_formula(tokens: int, seed: int) -> None:
    reference, other, targets = pair(tokens, seed)
    told, found = [list(map(log_probabilities, each)) for each in (reference, other)]
    divergences = sorted(
        math.fsum(math.exp(p) * (p - q) for p, q in zip(*rows, strict=True)) for rows in zip(told, found, strict=True)
    )
    losses = [[-row[target] for row, target in zip(rows, targets, strict=True)] for rows in (told, found)]
    changes = [theirs - ours for ours, theirs in zip(*losses, strict=True)]
    perplexities = [math.exp(math.fsum(each) / tokens) for each in losses]

    cost = tally(reference, other, targets).cost()
    assert cost.tokens == tokens
    assert cost.reference_perplexity == pytest.approx(perplexities[0], rel=1e-9)
    assert cost.perplexity == pytest.approx(perplexities[1], rel=1e-9)
    assert cost.perplexity_change == pytest.approx(perplexities[1] / perplexities[0] - 1, abs=1e-9)
    error = perplexities[1] / perplexities[0] * float(np.std(changes, ddof=1)) / math.sqrt(tokens)
    assert cost.perplexity_error == pytest.approx(error, rel=1e-6)
    assert cost.kl_mean == pytest.approx(math.fsum(divergences) / tokens, rel=1e-9)
    assert cost.kl_max == pytest.approx(divergences[-1], rel=1e-9)
    assert cost.kl_p99 == pytest.approx(divergences[math.ceil(0.99 * tokens) - 1], rel=1e-9)
    assert cost.top1 == sum(map(np.array_equal, reference.argmax(1), other.argmax(1))) / tokens
    assert cost.logit == pytest.approx(float(np.abs(reference.astype(np.float64) - other).max()))


@given(st.lists(st.integers(1, 39), max_size=5, unique=True))
def test_it_does_not_matter_how_many_rows_come_at_once(cuts: list[int]) -> None:
    reference, other, targets = pair(40, 1)
    whole, parts = tally(reference, other, targets).cost(), tally(reference, other, targets, *cuts).cost()
    for name in whole.__slots__:
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-12), name


def test_equal_scores_cost_nothing() -> None:
    reference, _, targets = pair(50, 2)
    cost = tally(reference, reference, targets).cost()
    assert (cost.perplexity, cost.top1) == (cost.reference_perplexity, 1.0)
    assert {cost.perplexity_change, cost.perplexity_error, cost.kl_mean, cost.kl_p99, cost.kl_max, cost.logit} == {0.0}


def test_logits_that_are_all_higher_by_the_same_cost_nothing_but_the_difference_shows() -> None:
    reference, _, targets = pair(50, 3)
    cost = tally(reference, reference + np.float32(2), targets).cost()
    assert cost.kl_max == pytest.approx(0, abs=1e-6)
    assert cost.perplexity_change == pytest.approx(0, abs=1e-6)
    assert cost.logit == pytest.approx(2, abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("whose", [0, 1])
def test_scores_that_are_no_numbers_are_an_error(bad: float, whose: int) -> None:
    *scores, targets = pair(5, 4)
    scores[whose][2, 3] = bad
    with pytest.raises(ModelError, match="not finite"):
        tally(scores[0], scores[1], targets)


def test_a_perplexity_beyond_float64_is_an_error() -> None:
    scores = np.zeros((2, 2), np.float32)
    scores[:, 1] = 1e6
    with pytest.raises(ModelError, match="beyond any number"):
        tally(scores, scores, np.zeros(2, np.int64)).cost()


def test_one_token_is_too_few() -> None:
    with pytest.raises(InvalidRequest) as caught:
        tally(*pair(1, 5)).cost()
    assert caught.value.field == "text"


def test_answers_are_alike_until_the_first_token_that_differs() -> None:
    found = likeness(
        [(1, 2, 3, 4)] * 4,
        [(1, 2, 3, 4), (9, 2, 3, 4), (1, 2, 9, 4), (1, 2, 3, 9)],
    )
    assert (found.alike, found.median, found.least) == ((4, 0, 2, 3), 2.5, 0)
