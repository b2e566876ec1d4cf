"""The judge of tokens is itself judged."""

import torch

from tests.support.judge import rejections


def test_the_best_and_its_equals_within_twice_the_bound_pass() -> None:
    scores = torch.tensor([[0.0, 1.0, 0.999], [5.0, 4.0, 3.0]])
    assert rejections(scores, [1, 0], bound=0.0) == []
    assert rejections(scores, [2, 0], bound=0.0006) == []


def test_a_token_further_off_is_named() -> None:
    (found,) = rejections(torch.tensor([[0.0, 1.0, 0.5]]), [2], bound=0.2)
    assert (found.position, found.token, found.best, found.shortfall) == (0, 2, 1, 0.5)


def test_nan_is_never_right() -> None:
    assert rejections(torch.tensor([[0.0, float("nan")]]), [1], bound=1.0)
