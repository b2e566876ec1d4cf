"""Laws of coalescing: prompts that come together are computed as if each block were asked for once."""

from __future__ import annotations

from collections.abc import Sequence as Items

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.paper import PAGE_TOKENS, Desk, next_token, paper_request, written
from twostroke.engine.sequence import EngineRequest
from twostroke.types import Priority

# Two letters make prompts share prefixes often; pages are plenty, so that nothing is evicted.
PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=24).map(tuple)
LIMITS = st.fixed_dictionaries(
    {"tokens_per_step": st.integers(6, 40), "max_running": st.integers(1, 6)}, optional={"max_chunk": st.integers(1, 9)}
)


@st.composite
def requests(draw: st.DrawFn) -> EngineRequest:
    prompt, first = draw(PROMPTS), draw(st.booleans())
    return paper_request(
        prompt,
        max_tokens=draw(st.integers(1, 6)),
        first_token_only=first,
        choices=(0, 1) if first else (0,),
        export=draw(st.booleans()),
        priority=draw(st.sampled_from(Priority)),
    )


def played(asked: Items[EngineRequest], limits: dict[str, int], *, coalescing: bool = True) -> Desk:
    """All of them at once, to their end, each with its own answer."""
    desk = Desk(pages=400, max_waiting=len(asked), **limits)
    if not coalescing:
        desk.core._paging.wait = lambda *_: None  # type: ignore[method-assign]
    numbers = [desk.submit(each) for each in asked]
    desk.drain()
    for number, request in zip(numbers, asked, strict=True):
        desk.core.loans.give_back(desk.lent(number))
        if request.first_token_only:
            assert desk.tokens(number) == [next_token(request.prompt, choice) for choice in request.choices]
        else:
            assert desk.tokens(number) == written(request.prompt, request.stops.max_tokens, end=None)[0]
    desk.settle()
    return desk


def run_tokens(desk: Desk) -> int:
    """Prompt tokens that were run."""
    chunks = [chunk for step in desk.paper.steps for chunk in step.chunks]
    return sum(max(0, min(each.count, len(each.sequence.request.prompt) - each.start)) for each in chunks)


def begin_alike(one: EngineRequest, other: EngineRequest) -> bool:
    """Whether the first block of one may serve the other, whole or as the rest of a prompt."""
    a, b = one.prompt[:PAGE_TOKENS], other.prompt[:PAGE_TOKENS]
    return a[: len(b)] == b[: len(a)]


@given(PROMPTS, st.integers(1, 9), LIMITS)
def test_identical_prompts_cost_one_of_them_and_one_token_for_each_other(
    prompt: tuple[int, ...], count: int, limits: dict[str, int]
) -> None:
    same = paper_request(prompt, first_token_only=True, export=True)
    assert run_tokens(played([same] * count, limits)) == len(prompt) + count - 1


@settings(max_examples=300)
@given(st.lists(requests(), min_size=1, max_size=8), LIMITS)
def test_no_mix_of_prompts_costs_more_than_without_coalescing(
    asked: list[EngineRequest], limits: dict[str, int]
) -> None:
    assert run_tokens(played(asked, limits)) <= run_tokens(played(asked, limits, coalescing=False))


@settings(max_examples=300)
@given(st.lists(requests(), min_size=1, max_size=8), LIMITS)
def test_a_prompt_is_overtaken_only_while_one_that_begins_like_it_runs(
    asked: list[EngineRequest], limits: dict[str, int]
) -> None:
    steps = played(asked, limits).chunks
    spans = {}
    for at, step in enumerate(steps):
        for number, _, _ in step:
            spans[number] = (spans.get(number, (at, at))[0], at)
    order = sorted(spans, key=lambda number: (asked[number].priority, number))
    for place, senior in enumerate(order):
        for junior in order[place + 1 :]:
            if spans[junior][0] < spans[senior][0]:
                alike = [each for each in spans if each != senior and begin_alike(asked[each], asked[senior])]
                assert any(spans[each][0] <= spans[junior][0] <= spans[each][1] for each in alike)
