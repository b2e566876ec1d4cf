"""A cluster of processes to be struck, and what must be true in it after every case."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tests.support.alone import Alone
from tests.support.processes import Processes, Service
from tests.support.routed import Question
from twostroke.types import SamplingParams, StopConditions

PROMPT_TOKENS, ANSWER_TOKENS = 200, 48
ANSWER_SECONDS, RECORD_SECONDS = 40.0, 10.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a case went.

    Attributes:
        name: of the case.
        blow: that was dealt.
        recovered: seconds from the blow to the end of the answer.
        freed: seconds from then until nothing was held anywhere.
        attempts: calls to workers that the request took, where its usage record can be read.
        returned: seconds from the blow until what it took away was there again, where that is no process.
    """

    name: str
    blow: str
    recovered: float
    freed: float
    attempts: int | None = None
    returned: float | None = None


class Stage:
    """A cluster in which one case after the other is played."""

    def __init__(self, whole: Processes, alone: Alone, seed: int) -> None:
        self.whole = whole
        self.alone = alone
        self.dice = new_dice(type(self).__name__, seed)
        self._count = 0

    def begun(self, kind: str) -> tuple[str, Question]:
        """A name for a request, and a question that nobody has asked before. What was logged until now is forgotten."""
        for each in self.whole.services:
            each.forget_lines()
        return self.named(kind), self.question()

    def named(self, kind: str) -> str:
        """A request's name that no other has."""
        self._count += 1
        return f"{kind}-{self._count}"

    def question(self, tokens: int = PROMPT_TOKENS) -> Question:
        """One that nobody has asked before."""
        return new_question(self.dice, tokens)

    async def record(self, name: str) -> dict[str, Any]:
        """The one usage record of a request; a caller that left does not see it written."""
        async with asyncio.timeout(RECORD_SECONDS):
            while not self.whole.recorded(name):
                await asyncio.sleep(0.01)
        return self.whole.record(name)

    def assert_calm(self) -> None:
        """Everybody lives, and nobody logged a defect."""
        assert_calm(self.whole.services)


def new_dice(kind: str, seed: int) -> random.Random:
    """What no two kinds of stage have alike: they do not ask the same."""
    return random.Random(f"{kind} {seed}")


def new_question(dice: random.Random, tokens: int = PROMPT_TOKENS) -> Question:
    """One that nobody has asked before."""
    prompt = tuple(dice.randrange(256) for _ in range(tokens))
    sampling = SamplingParams(temperature=dice.choice((0.0, 0.8)), seed=dice.randrange(1 << 31))
    stops = StopConditions(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    return Question(prompt=prompt, stops=stops, sampling=sampling)


def assert_calm(services: Iterable[Service]) -> None:
    """Everybody lives, and nobody logged a defect."""
    for each in services:
        each.assert_calm()
