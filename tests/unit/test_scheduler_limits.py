from __future__ import annotations

import pytest

from tests.support.paper import CONTEXT, VOCAB, Desk, paper_request
from twostroke.engine.settings import EngineSettings
from twostroke.errors import BlocksMissing, ContextTooLong, InvalidRequest, Overloaded
from twostroke.types import FinishReason, Priority

PROMPT = list(range(10, 20))


def test_a_request_that_outgrows_the_pool_is_refused_and_a_later_one_runs() -> None:
    desk = Desk(pages=5)
    with pytest.raises(ContextTooLong) as refused:
        desk.submit(paper_request(PROMPT, max_tokens=20))
    assert refused.value.field == "max_tokens"
    with pytest.raises(ContextTooLong) as refused:
        desk.submit(paper_request(list(range(30))))
    assert refused.value.field == "prompt"
    number = desk.submit(paper_request(PROMPT, max_tokens=7))  # the last token needs no page: exactly four pages
    desk.settle()
    desk.expect(number, PROMPT, 7)


def test_a_prompt_that_leaves_no_room_in_the_context_is_refused() -> None:
    desk = Desk()
    with pytest.raises(ContextTooLong):
        desk.submit(paper_request([1] * CONTEXT))
    number = desk.submit(paper_request([1] * (CONTEXT - 1), max_tokens=50))
    desk.settle()
    assert len(desk.tokens(number)) == 1
    assert desk.finish(number) is FinishReason.LENGTH


def test_more_requests_than_may_wait_are_refused_as_overload() -> None:
    desk = Desk(max_running=1, max_waiting=2)
    kept = [desk.submit(paper_request([n])) for n in range(3)]
    refused = desk.submit(paper_request([9]))
    assert isinstance(desk.errors[refused], Overloaded)
    desk.settle()
    assert all(len(desk.tokens(number)) == 8 for number in kept)


def test_too_many_tokens_to_compute_is_refused_at_admission_and_holds_nothing() -> None:
    desk = Desk()
    refused = desk.submit(paper_request(PROMPT, max_uncached=9))
    desk.step()
    assert isinstance(desk.errors[refused], BlocksMissing)
    assert desk.core.load().free_pages == desk.core.load().pages
    allowed = desk.submit(paper_request(PROMPT, max_uncached=10))
    desk.settle()
    desk.expect(allowed, PROMPT, 8)


def test_preemption_does_not_turn_into_missing_blocks() -> None:
    desk = Desk(max_running=1)
    low = desk.submit(paper_request(PROMPT, max_uncached=10, max_tokens=8))
    for _ in range(5):
        desk.step()
    desk.submit(paper_request([5], priority=Priority.INTERACTIVE, max_tokens=2))
    desk.step()
    desk.core.loans.give_back(desk.core.loans.take(99))  # all that was cached is gone
    desk.settle()
    desk.expect(low, PROMPT, 8)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (paper_request([]), "prompt"),
        (paper_request([VOCAB]), "prompt"),
        (paper_request([-1]), "prompt"),
        (paper_request([1], emitted=(VOCAB,)), "emitted"),
        (paper_request([1], max_tokens=0), "max_tokens"),
        (paper_request([1], choices=(0, 1)), "n"),
        (paper_request([1], choices=()), "n"),
        (paper_request([1], max_uncached=-1), "max_uncached"),
    ],
)
def test_a_request_out_of_range_is_refused_naming_its_field(wrong: object, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Desk().submit(wrong)  # type: ignore[arg-type]
    assert refused.value.field == field


@pytest.mark.parametrize(
    "wrong",
    [{"pages": 1}, {"tokens_per_step": 0}, {"max_running": 0}, {"max_waiting": 0}, {"max_chunk": 0}],
)
def test_settings_out_of_range_are_refused_naming_the_field(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        EngineSettings(**{"pages": 8} | wrong)


def test_every_running_sequence_must_fit_the_step() -> None:
    with pytest.raises(ValueError, match="tokens_per_step"):
        EngineSettings(pages=8, tokens_per_step=8, max_running=9)
