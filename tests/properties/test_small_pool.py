"""Any load on any small pool: each request that fits alone gets its answer; steps and preemptions keep to a law."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import accumulate

from hypothesis import given, settings, target
from hypothesis import strategies as st

from tests.support.paper import PAGE_TOKENS, Desk, next_token, paper_request, written
from twostroke.engine.sequence import EngineRequest, Sequence
from twostroke.types import Priority

LIVELOCK = 5_000  # rounds; the largest load here has fewer than 400 tokens


@dataclass(frozen=True)
class Load:
    """Requests by the round in which they come, and what they meet."""

    pages: int  # that can be given out
    limits: dict[str, int]
    requests: tuple[tuple[int, EngineRequest], ...]
    greed: int = 0  # pages that a borrower asks for in every round
    patience: int = 0  # rounds until a loan comes back


@st.composite
def limits(draw: st.DrawFn) -> dict[str, int]:
    tokens = draw(st.integers(1, 16))
    chosen = {"tokens_per_step": tokens, "max_running": draw(st.integers(1, min(tokens, 6))), "max_waiting": 10}
    return chosen | draw(st.fixed_dictionaries({}, optional={"max_chunk": st.integers(1, 16)}))


@st.composite
def crowds(draw: st.DrawFn) -> Load:
    """Requests that share nothing, all there at the start."""
    pages, requests = draw(st.integers(2, 12)), []
    for number in range(draw(st.integers(2, 8))):
        length, max_tokens = draw(sizes(pages))
        prompt = [number, *range(20, 20 + length - 1)]
        request = paper_request(prompt, max_tokens=max_tokens, priority=draw(st.sampled_from(Priority)))
        requests.append((0, request))
    return Load(pages, draw(limits()), tuple(requests))


@st.composite
def traffic(draw: st.DrawFn) -> Load:
    """Requests that share much and come at any time, among loans and exports."""
    pages, requests, now = draw(st.integers(2, 12)), [], 0
    for _ in range(draw(st.integers(1, 8))):
        now += draw(st.integers(0, 12))
        length, max_tokens = draw(sizes(pages))
        first = draw(st.booleans()) and draw(st.booleans())
        request = paper_request(
            draw(st.lists(st.integers(1, 2), min_size=length, max_size=length)),
            max_tokens=max_tokens,
            priority=draw(st.sampled_from(Priority)),
            first_token_only=first,
            choices=(0, 1) if first else (0,),
            export=draw(st.booleans()),
        )
        requests.append((now, request))
    return Load(pages, draw(limits()), tuple(requests), draw(st.integers(0, 6)), draw(st.integers(0, 5)))


@st.composite
def sizes(draw: st.DrawFn, pages: int) -> tuple[int, int]:
    """Tokens of a prompt and of its answer; together they just fit the pool, or are smaller."""
    room = pages * PAGE_TOKENS
    length = draw(st.integers(1, min(room, 24)))
    return length, draw(st.integers(1, min(room + 1 - length, 30)))


class Play:
    """A load, played to its end. What is lent is overwritten, and comes back after so many rounds."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.desk = Desk(pages=load.pages + 1, **load.limits)
        self.rounds = 0
        self._lent: deque[list[int]] = deque([] for _ in range(load.patience))
        self._exported: dict[int, int] = {}
        self._arrivals = deque(load.requests)
        while self._arrivals or self.desk.core.busy:
            self._round()
            assert self.rounds < LIVELOCK
        for pages in self._lent:
            self.desk.core.loans.give_back(pages)
        self.desk.settle()
        assert self.desk.core.load().lent_pages == 0

    @property
    def sequences(self) -> list[Sequence]:
        """In order of seniority."""
        ran = {chunk.sequence for step in self.desk.paper.steps for chunk in step.chunks}
        return sorted(ran, key=lambda each: (each.request.priority, each.number))

    def assert_answered(self) -> None:
        for number, (_, request) in enumerate(self.load.requests):
            if request.first_token_only:
                expected = [next_token(request.prompt, choice) for choice in request.choices]
            else:
                expected = written(request.prompt, request.stops.max_tokens, end=None)[0]
            assert self.desk.tokens(number) == expected
        assert not self.desk.errors

    def _round(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.rounds:
            number = self.desk.submit(self._arrivals.popleft()[1])
            self._exported[number] = 0
        ran = self.desk.step()
        assert ran or not self.desk.core.busy or self.desk.core.load().lent_pages > 0
        self._lent.append(self._borrowed() + self._taken_out())
        self.desk.core.loans.give_back(self._lent.popleft())
        self.rounds += 1

    def _borrowed(self) -> list[int]:
        pages = self.desk.core.lend_pages(self.load.greed)
        self.desk.paper.pages |= {page: [96] * PAGE_TOKENS for page in pages}
        return pages

    def _taken_out(self) -> list[int]:
        """Pages exported since the last round."""
        found = []
        for number, before in self._exported.items():
            pages = self.desk.lent(number)
            found += pages[before:]
            self._exported[number] = len(pages)
        return found


def pages_grown(sequence: Sequence) -> int:
    """Most pages that a sequence takes one by one, after it was admitted."""
    begun = min(len(sequence.request.prompt) + 1, sequence.longest)
    return -(-sequence.longest // PAGE_TOKENS) + -begun // PAGE_TOKENS


@settings(max_examples=300)
@given(crowds())
def test_a_crowd_is_answered_in_fewer_steps_than_tokens_and_each_gives_way_once_for_each_before_it(load: Load) -> None:
    play = Play(load)
    play.assert_answered()
    assert play.rounds <= sum(sequence.longest for sequence in play.sequences)
    assert all(sequence.preemptions <= before for before, sequence in enumerate(play.sequences))
    target(float(sum(sequence.preemptions for sequence in play.sequences)))


@settings(max_examples=300)
@given(traffic())
def test_traffic_among_loans_is_answered_and_each_time_one_gives_way_a_senior_one_grew_or_a_higher_one_came(
    load: Load,
) -> None:
    """A page is grown once, and a higher class comes in once more than it gives way itself: so all of it is bounded."""
    play = Play(load)
    play.assert_answered()
    stints = sum((1 + sequence.preemptions) * sequence.longest for sequence in play.sequences)
    assert len(play.desk.paper.steps) <= stints
    grown = accumulate(pages_grown(sequence) for sequence in play.sequences)
    for sequence, pages in zip(play.sequences, grown, strict=True):
        higher = [each for each in play.sequences if each.request.priority < sequence.request.priority]
        assert sequence.preemptions <= pages + sum(1 + each.preemptions for each in higher)
    target(float(sum(sequence.preemptions for sequence in play.sequences)))
