"""What is asked, and how patient the caller is: drawn at random, always the same from the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.support.routed import SECONDS, Question
from twostroke.types import SamplingParams, StopConditions

RECURRING = 128  # questions that are asked again and again
PREFIXES = 8  # that other questions share
LONGEST_PREFIX, LONGEST_TAIL, LONGEST_ANSWER = 160, 64, 24  # tokens
TIGHT_SECONDS = (0.002, 0.4)  # the shortest and the longest deadline of a caller in a hurry
LEAVE_SECONDS = 0.15  # about the time of a prompt on a busy machine
BYTES = 256  # tokens of the tiny tokenizer that are text


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request.

    Attributes:
        name: its id.
        question: what is asked.
        recurs: whether it will be asked again.
        lone: asked of the router that knows one worker of each kind.
        seconds: until its deadline.
        leaves_at: tokens of the least far choice after which the caller leaves; None: it does not.
        leaves_in: seconds after which the caller leaves, wherever the answer is; None: it does not.
    """

    name: str
    question: Question
    recurs: bool
    lone: bool
    seconds: float = SECONDS
    leaves_at: int | None = None
    leaves_in: float | None = None


class Mix:
    """Draws requests: half of the callers wait, a quarter leaves, a quarter is in a hurry."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._prefixes = [self._tokens(self._dice.randrange(16, LONGEST_PREFIX)) for _ in range(PREFIXES)]
        self._recurring = [self._question() for _ in range(RECURRING)]
        self._count = 0

    def draw(self) -> Request:
        """The next request."""
        dice = self._dice
        self._count += 1
        recurs = dice.random() < 0.5
        question = dice.choice(self._recurring) if recurs else self._question()
        request = Request(name=f"soak-{self._count}", question=question, recurs=recurs, lone=dice.random() < 0.1)
        match dice.choice(("waits", "waits", "waits", "waits", "counts", "leaves", "hurries", "hurries")):
            case "counts":
                return replace(request, leaves_at=dice.randint(1, question.stops.max_tokens))
            case "leaves":
                return replace(request, leaves_in=dice.random() * LEAVE_SECONDS)
            case "hurries":
                return replace(request, seconds=dice.uniform(*TIGHT_SECONDS))
        return request

    def _question(self) -> Question:
        dice = self._dice
        shared = dice.choice(self._prefixes) if dice.random() < 0.5 else ()
        most = dice.randint(1, LONGEST_ANSWER)
        sampling = SamplingParams(temperature=0.0)
        if dice.random() < 0.5:
            sampling = SamplingParams(temperature=0.8, top_p=dice.choice((1.0, 0.9)), seed=dice.getrandbits(64))
        stops = StopConditions(max_tokens=most, min_tokens=dice.choice((0, most)), ignore_eos=dice.random() < 0.5)
        return Question(
            prompt=shared + self._tokens(dice.randint(1, LONGEST_TAIL)),
            stops=stops,
            sampling=sampling,
            n=dice.choice((1, 1, 1, 2)),
            stop_strings=("e",) if dice.random() < 0.1 else (),
        )

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._dice.randrange(BYTES) for _ in range(count))
