from __future__ import annotations

from dataclasses import replace
from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twostroke.engine.filters import survivors
from twostroke.engine.history import TokenHistory
from twostroke.engine.noise import gumbel, stream_key
from twostroke.engine.sampler import Draw, sample
from twostroke.types import SamplingParams

VOCAB = 300

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 299, 300, 1000]),
    top_p=st.sampled_from([0.001, 0.5, 0.9, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-10, 10), max_size=3),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.none() | st.integers(0, 5),
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=8)


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    return Draw(
        params=draw(PARAMS),
        position=draw(st.integers(0, 10_000)),
        choices=tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))),
        history=draw(st.none() | st.builds(TokenHistory, TOKENS, TOKENS)),
        banned=frozenset(draw(TOKENS)),
    )


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    """Logits, coarse in half of the cases so that ties are everywhere."""
    seed, coarse = draw(st.integers(0, 1 << 30)), draw(st.booleans())
    values = 4 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    return values.round() if coarse else values


WORK = st.lists(st.tuples(rows(), draws()), min_size=1, max_size=5)


@settings(deadline=None, max_examples=60)
@given(work=WORK, order=st.randoms(use_true_random=False))
def test_a_row_draws_the_same_alone_in_any_batch_and_in_any_place(
    work: list[tuple[Tensor, Draw]], order: Random
) -> None:
    alone = [sample(row[None], [draw])[0] for row, draw in work]
    places = list(range(len(work)))
    order.shuffle(places)
    logits = torch.stack([work[place][0] for place in places])
    together = sample(logits, [work[place][1] for place in places])
    assert together == [alone[place] for place in places]


def filtered(scores: Tensor, params: SamplingParams) -> list[int]:
    """The filters by their definitions, one token at a time."""
    ids = sorted(range(len(scores)), key=lambda token: (-float(scores[token]), token))
    ids = ids[: params.top_k or len(ids)]
    mass = [float(scores[token].exp()) for token in ids]
    kept, before = [], 0.0
    for token, weight in zip(ids, mass, strict=True):
        if params.top_p < 1 and before >= params.top_p * sum(mass) and kept:
            break
        kept.append(token)
        before += weight
    return [token for token in kept if float(scores[token].exp()) >= params.min_p * (1 - 1e-12)]


@settings(deadline=None, max_examples=60)
@given(row=rows(), draw=draws())
def test_filters_keep_what_their_definitions_say(row: Tensor, draw: Draw) -> None:
    params = replace(draw.params, temperature=draw.params.temperature or 1.0)
    gaps = row.max() - row
    expected = filtered(-gaps.double() / params.temperature, params)
    ids = survivors(gaps[None], [params])[1].tolist()
    if draw.params.top_p == 0.999999:  # sums in another order may round to the other side of the edge
        assert abs(len(ids) - len(expected)) <= 1
    else:
        assert sorted(ids) == sorted(expected)


@settings(deadline=None, max_examples=60)
@given(row=rows(), seed=st.integers(0, 2**64 - 1), position=st.integers(0, 1000), choice=st.integers(0, 9))
def test_a_token_drawn_without_filters_has_the_best_logit_plus_noise(
    row: Tensor, seed: int, position: int, choice: int
) -> None:
    draw = Draw(params=SamplingParams(seed=seed), position=position, choices=(choice,))
    (drawn,) = sample(row[None], [draw])
    assert drawn is not None
    noisy = (row - row.max()).double() + gumbel(stream_key(seed, choice, position), torch.arange(VOCAB))
    assert drawn[0].id == int(noisy.argmax())


@settings(deadline=None, max_examples=40)
@given(prompt=TOKENS, generated=TOKENS)
def test_a_history_grown_token_by_token_equals_one_made_at_once(prompt: list[int], generated: list[int]) -> None:
    grown = TokenHistory(prompt, [])
    for token in generated:
        grown.extend([token])
    whole = TokenHistory(prompt, generated)
    assert (grown.ids, grown.counts) == (whole.ids, whole.counts)
    assert {token: count for token, count in zip(whole.ids, whole.counts, strict=True) if count} == {
        token: generated.count(token) for token in generated
    }
