"""Noise is part of what a seed means: golden vectors, so that no version or machine changes an answer."""

from __future__ import annotations

import pytest
import torch

from twostroke.engine.noise import gumbel, stream_key, token_bits


def test_the_hash_gives_the_published_outputs_of_splitmix64() -> None:
    bits = [word % 2**64 for word in token_bits(1234567, torch.arange(5)).tolist()]
    assert bits == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize(
    ("words", "key", "noise"),
    [
        ((0, 0, 0), 0x238275BC38FCBE91, [-0.7143951177675683, -1.0977226395059996, 0.00905427147171042]),
        ((42, 0, 17), 0xDEE3D6F2736F2D92, [-0.6751294210062997, 0.13306733638378987, 2.115794353794772]),
        ((2**64 - 1, 3, 1 << 20), 0x40032D6B75B70480, [-0.16704733705617195, 0.3689333884827688, 1.429616794330713]),
    ],
)
def test_noise_is_the_same_on_every_machine_and_in_every_version(
    words: tuple[int, int, int], key: int, noise: list[float]
) -> None:
    assert stream_key(*words) == key
    assert gumbel(key, torch.tensor([0, 1, 49151])).tolist() == pytest.approx(noise, rel=1e-12)


def test_noise_of_a_token_does_not_depend_on_which_others_are_asked_for() -> None:
    everyone = gumbel(7, torch.arange(1000))
    assert gumbel(7, torch.tensor([999, 3, 500])).tolist() == everyone[torch.tensor([999, 3, 500])].tolist()
    assert everyone.isfinite().all()


def test_noise_has_the_mean_and_variance_of_the_gumbel_distribution() -> None:
    noise = torch.cat([gumbel(stream_key(1, 0, position), torch.arange(1000)) for position in range(200)])
    assert float(noise.mean()) == pytest.approx(0.57722, abs=0.01)  # Euler's constant; the bound is 3.5 deviations
    assert float(noise.var()) == pytest.approx(1.64493, abs=0.03)  # pi squared over six


@pytest.mark.parametrize(("key", "bits"), [(0x61C8864680B583EB, 0), (0x31628AF67B2131AB, 2**64 - 1)])
def test_the_extreme_words_of_the_hash_give_finite_noise(key: int, bits: int) -> None:
    """The first token's hash is all zeros, or all ones: the uniform number is still neither 0 nor 1."""
    assert int(token_bits(key, torch.tensor([0]))) % 2**64 == bits
    assert gumbel(key, torch.tensor([0])).isfinite().all()
