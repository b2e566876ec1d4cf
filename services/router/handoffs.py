"""Where each choice of a request is in its handoff: kept by the errand, shown by metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from services.router.answer import Choice
from services.router.metrics import Metrics
from twostroke.errors import DeadlineExceeded, TwostrokeError
from twostroke.routing.stages import RULES, Event, Stage, move


class Handoffs:
    """The stages of one request's choices, from queued to done. Leaving the block ends those that go on."""

    def __init__(self, choices: Iterable[Choice], metrics: Metrics) -> None:
        self._stages = {choice.index: Stage.QUEUED for choice in choices}
        self._since = dict.fromkeys(self._stages, time.monotonic())
        self._metrics = metrics

    def __enter__(self) -> Self:
        for stage in self._stages.values():
            self._metrics.entered(stage)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, DeadlineExceeded):
            end = Event.DEADLINE
        else:
            end = Event.GIVEN_UP if isinstance(error, TwostrokeError) else Event.CANCELLED
        for index, stage in self._stages.items():
            if stage is not Stage.DONE:
                self._move(index, end)

    def note(self, event: Event, *choices: Choice) -> None:
        """Something happened to these choices. Raises Internal, when it has no place where one of them is."""
        for choice in choices:
            self._move(choice.index, event)

    def lease_ended(self) -> None:
        """The lease of a ticket ended before every choice had its blocks."""
        for index, stage in self._stages.items():
            if Event.LEASE_ENDED in RULES[stage]:
                self._move(index, Event.LEASE_ENDED)

    def _move(self, index: int, event: Event) -> None:
        before, after, now = self._stages[index], move(self._stages[index], event), time.monotonic()
        self._metrics.moved(before, event, after, now - self._since[index])
        self._stages[index], self._since[index] = after, now
