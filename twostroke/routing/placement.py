"""Placement: which prefill and which decode worker, by what must be computed there and what is waiting there.

The unit is tokens of work. For prefill: tokens that wait already, plus those of this prompt that are not cached, with a
stored token at a fraction of a computed one. For decode: streams that run or wait, plus what must be loaded; a worker
without memory for the prompt comes last. Ties go to the worker that was chosen least recently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.cluster import WorkerLoad

STORED_SHARE = 0.05  # loading a token's block against computing it: a copy at memory speed against a forward pass
STREAM_TOKENS = 64.0  # what one more running stream costs a decode worker, against loading tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A worker that may take the request."""

    worker: str
    load: WorkerLoad
    pending_tokens: int = 0  # sent there by this router, not yet in its reports
    open_streams: int = 0  # of this router
    matched_tokens: int = 0  # of the prompt, expected in its pages
    last_chosen: int = 0  # number of the decision that chose it last


@dataclass(frozen=True, slots=True)
class Score:
    """A candidate and its terms; the lowest total is chosen."""

    worker: str
    total: float
    queued: float
    compute: float
    load: float


def rank_prefill(candidates: Sequence[Candidate], prompt_tokens: int, stored_tokens: int) -> list[Score]:
    """Candidates for prefill, best first.

    Args:
        candidates: workers that are available.
        prompt_tokens: length of the prompt.
        stored_tokens: leading tokens that the store holds.
    """

    def score(candidate: Candidate) -> Score:
        local = min(candidate.matched_tokens, prompt_tokens)
        loaded = max(0, min(stored_tokens, prompt_tokens) - local)
        queued = float(max(candidate.load.waiting_tokens, candidate.pending_tokens))
        compute, load = float(prompt_tokens - local - loaded), loaded * STORED_SHARE
        return Score(candidate.worker, queued + compute + load, queued, compute, load)

    return _ranked(candidates, [score(each) for each in candidates])


def rank_decode(candidates: Sequence[Candidate], prompt_tokens: int, block_tokens: int) -> list[Score]:
    """Candidates for decode, best first; arguments as in `rank_prefill`."""

    def score(candidate: Candidate) -> Score:
        streams = max(candidate.load.running + candidate.load.waiting, candidate.open_streams)
        queued = streams * STREAM_TOKENS
        load = max(0, prompt_tokens - candidate.matched_tokens) * STORED_SHARE
        room = (candidate.load.free_pages + candidate.load.evictable_pages) * block_tokens
        compute = float(max(0, prompt_tokens - room))  # what other streams would have to give up
        return Score(candidate.worker, queued + load + compute, queued, compute, load)

    return _ranked(candidates, [score(each) for each in candidates])


def _ranked(candidates: Sequence[Candidate], scores: Sequence[Score]) -> list[Score]:
    last_chosen = {candidate.worker: candidate.last_chosen for candidate in candidates}
    return sorted(scores, key=lambda score: (score.total, last_chosen[score.worker], score.worker))
