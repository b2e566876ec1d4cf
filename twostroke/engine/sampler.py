"""From logits to tokens. A row's outcome depends on that row alone: never on its batch mates or its place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from twostroke.engine.contest import Contest
from twostroke.engine.filters import is_filtered, survivors
from twostroke.engine.gaps import Gaps
from twostroke.engine.history import TokenHistory
from twostroke.engine.logprobs import with_logprobs
from twostroke.engine.noise import stream_key, stream_words
from twostroke.engine.penalties import add_bias, ban, penalize
from twostroke.types import SamplingParams, Token

_IN_CACHE = 1 << 17  # logits a CPU draws from at once: its temporaries, 1 MiB each, stay in a core's cache
_IN_MEMORY = 1 << 25  # logits any other device does: temporaries of at most 256 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What one row of logits is sampled for."""

    params: SamplingParams
    position: int  # of the new token in the whole sequence
    choices: tuple[int, ...] = (0,)  # one token is drawn for each
    history: TokenHistory | None = None  # what the penalties look at; None when none is in force
    banned: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _Ask:
    """One token to draw with noise, and its place among all tokens of the step."""

    place: int
    row: int
    params: SamplingParams
    key: int


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[tuple[Token, ...] | None]:
    """Draw each row's tokens in the order that SamplingParams states.

    Args:
        logits: float32 [R, V].
        draws: R of them.
    Returns: a token per choice for each row; None for a row that is not finite or leaves no token to choose.
    """
    adjusted = _adjusted(logits, draws)
    highest, likeliest = adjusted.max(dim=1)  # of equals the first; a NaN anywhere in a row wins
    finite = highest.isfinite() & logits.amax(dim=1).isfinite()
    rows = [row for row, draw in enumerate(draws) for _ in draw.choices]
    chosen = likeliest[_indices(rows, logits)]
    for filtered in False, True:
        asks = [ask for ask in _asks(draws) if is_filtered(ask.params, logits.shape[1]) == filtered]
        for part in _parts(asks, logits):
            places = _indices([ask.place for ask in part], logits)
            chosen[places] = _drawn(adjusted, highest, likeliest, part, filtered=filtered)
    tokens = _reported(logits, draws, chosen.tolist())
    return [each if fine else None for each, fine in zip(tokens, finite.tolist(), strict=True)]


def _adjusted(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The rows after penalties, bias and bans; the raw ones stay as they are, for log-probabilities."""
    penalized = {row: (draw.params, draw.history) for row, draw in enumerate(draws) if draw.history is not None}
    biased = {row: draw.params.logit_bias for row, draw in enumerate(draws) if draw.params.logit_bias}
    banned = {row: draw.banned for row, draw in enumerate(draws) if draw.banned}
    if not (penalized or biased or banned):
        return logits
    adjusted = logits.clone()
    if penalized:
        penalize(adjusted, penalized)
    if biased:
        add_bias(adjusted, biased)
    if banned:
        ban(adjusted, banned)
    return adjusted


def _asks(draws: Sequence[Draw]) -> Iterator[_Ask]:
    """The tokens that noise takes part in choosing."""
    place = 0
    for row, draw in enumerate(draws):
        if draw.params.temperature > 0:
            for offset, choice in enumerate(draw.choices):
                key = stream_key(draw.params.seed, choice, draw.position)
                yield _Ask(place + offset, row, draw.params, key)
        place += len(draw.choices)


def _parts(asks: Sequence[_Ask], logits: Tensor) -> Iterator[Sequence[_Ask]]:
    """Runs of asks short enough for the temporaries that drawing them takes."""
    room = _IN_CACHE if logits.device.type == "cpu" else _IN_MEMORY
    count = max(1, room // logits.shape[1])
    for start in range(0, len(asks), count):
        yield asks[start : start + count]


def _drawn(adjusted: Tensor, highest: Tensor, likeliest: Tensor, asks: Sequence[_Ask], *, filtered: bool) -> Tensor:
    """A token id for each ask, all of them filtered or none: int64 [n]."""
    rows = _indices([ask.row for ask in asks], adjusted)
    temperatures = [ask.params.temperature for ask in asks]
    contest = Contest(
        gaps=Gaps(adjusted, highest, rows),
        likeliest=likeliest[rows],
        temperatures=torch.tensor(temperatures, dtype=torch.float64, device=adjusted.device),
        keys=stream_words([ask.key for ask in asks], adjusted.device),
    )
    if filtered:
        return contest.winners(*survivors(highest[rows, None] - adjusted[rows], [ask.params for ask in asks]))
    return contest.winners(*contest.contenders(torch.arange(len(asks), device=adjusted.device)))


def _reported(logits: Tensor, draws: Sequence[Draw], chosen: Iterable[int]) -> list[tuple[Token, ...]]:
    """Each row's tokens, with log-probabilities of the raw logits where they are asked for."""
    ids = iter(chosen)
    tokens = [tuple(map(Token, islice(ids, len(draw.choices)))) for draw in draws]
    asked = {row: draw.params.logprobs for row, draw in enumerate(draws) if draw.params.logprobs is not None}
    if asked:
        raw = logits[_indices(list(asked), logits)]
        told = with_logprobs(raw, [tokens[row] for row in asked], list(asked.values()))
        for row, each in zip(asked, told, strict=True):
            tokens[row] = each
    return tokens


def _indices(values: Sequence[int], logits: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=logits.device)
