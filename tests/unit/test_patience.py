"""Patience: transfers of a stage share a quarter of the time that a request had left when the stage began."""

from __future__ import annotations

import pytest

from twostroke.errors import Unavailable
from twostroke.worker.patience import Patience


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now

    def fail_after(self, seconds: float) -> None:
        self.now += seconds
        raise Unavailable("the store does not answer")


def test_a_transfer_may_take_a_quarter_of_the_time_left() -> None:
    with Patience(108.0, Clock()).waiting() as soon:
        assert soon == 102.0


def test_what_one_transfer_took_the_next_ones_of_the_stage_lack_and_other_work_costs_nothing() -> None:
    clock = Clock()
    patience = Patience(108.0, clock)
    with pytest.raises(Unavailable), patience.waiting():
        clock.fail_after(1.5)
    clock.now += 3.0
    with patience.waiting() as soon:
        assert soon == clock.now + 0.5


def test_a_request_whose_time_is_up_waits_for_nothing() -> None:
    clock = Clock()
    with Patience(99.0, clock).waiting() as soon:
        assert soon is not None
        assert soon < clock.now


def test_without_a_deadline_each_call_has_its_own_limit() -> None:
    with Patience(None, Clock()).waiting() as soon:
        assert soon is None
