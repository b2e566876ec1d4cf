"""The table of handoff stages: complete, without dead ends, and equal to its page."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.errors import Internal
from twostroke.routing.stages import MEANING, RULES, Event, Stage, move
from twostroke.routing.stages_page import render

PAGE = Path(__file__).parents[2] / "docs" / "handoff.md"
OPEN = [stage for stage in Stage if stage is not Stage.DONE]
LOSSES = {
    Stage.QUEUED: Event.PREFILL_ABSENT,
    Stage.COMPUTING: Event.PREFILL_LOST,
    Stage.PUBLISHED: Event.PREFILL_LOST_LATE,
    Stage.LOADING: Event.DECODE_LOST,
    Stage.OWNED: Event.DECODE_LOST,
}


def test_the_page_in_docs_is_written_from_the_table() -> None:
    assert PAGE.read_text() == render(), "run `make docs`"


@pytest.mark.parametrize("stage", OPEN)
def test_every_open_stage_has_a_rule_for_a_caller_that_leaves_for_the_deadline_and_for_giving_up(stage: Stage) -> None:
    for event in (Event.CANCELLED, Event.DEADLINE, Event.GIVEN_UP):
        assert move(stage, event) is Stage.DONE


@pytest.mark.parametrize("stage", OPEN)
def test_every_open_stage_has_a_rule_for_the_loss_of_its_worker_that_does_not_end_the_request(stage: Stage) -> None:
    assert move(stage, LOSSES[stage]) is not Stage.DONE


@pytest.mark.parametrize("stage", [Stage.COMPUTING, Stage.PUBLISHED, Stage.LOADING])
def test_a_lease_that_ends_while_it_is_needed_moves_nothing_by_itself(stage: Stage) -> None:
    assert move(stage, Event.LEASE_ENDED) is stage


def test_nothing_happens_to_a_choice_that_is_done() -> None:
    for event in Event:
        with pytest.raises(Internal, match="done"):
            move(Stage.DONE, event)


def test_every_event_has_a_meaning_and_a_place() -> None:
    assert set(MEANING) == set(Event) == {event for rules in RULES.values() for event in rules}


@given(st.lists(st.sampled_from(list(Event)), max_size=40))
def test_from_wherever_events_lead_tokens_flow_only_after_admission_and_the_end_can_be_reached(
    events: list[Event],
) -> None:
    stage = Stage.QUEUED
    for event in events:
        if event in RULES[stage]:
            if event is Event.TOKENS:
                assert stage is Stage.OWNED
            stage = move(stage, event)
    way = [Event.PREFILL_ABSENT, Event.DECODE_CALLED, Event.ADMITTED, Event.FINISHED]
    for event in (Event.PREFILL_LOST, *way):
        if event in RULES[stage]:
            stage = move(stage, event)
    assert stage is Stage.DONE
