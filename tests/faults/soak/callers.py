"""Callers: they ask, wait or leave, and hold what they were told to the truth."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass

from tests.faults.soak.mix import Request
from tests.faults.soak.truth import Truth
from tests.support.processes import Processes
from tests.support.routed import Answering, Routed
from twostroke.errors import DeadlineExceeded, TwostrokeError

SHOWN = 20  # what went wrong is told so many times; all are counted


@dataclass(frozen=True)
class Seen:
    """What a caller has to say about its bill.

    Attributes:
        outcome: complete, left, expired, or failed.
        begun: whether an event came.
        tokens: that came, of all choices; all there are, where it is complete.
    """

    outcome: str
    begun: bool
    tokens: int
    prompt_tokens: int


class Callers:
    """Plays requests, one call of `play` each."""

    def __init__(self, whole: Processes, truth: Truth) -> None:
        self._whole = whole
        self._truth = truth
        self.outcomes: Counter[str] = Counter()
        self.wrong: deque[str] = deque(maxlen=SHOWN)
        self.seen: dict[str, Seen] = {}  # by name; whoever checks the bills empties it

    async def play(self, request: Request) -> None:
        """Ask, and judge what came. What is wrong is noted, not raised."""
        changed = asyncio.Event()
        answering = Answering(request.question, changed.set)
        router = self._whole.lone if request.lone else self._whole.router
        asking = answering.asked(self._whole.clients[router], request_id=request.name, seconds=request.seconds)
        asked = asyncio.create_task(asking, name=request.name)
        try:
            outcome = await self._outcome(request, answering, asked, changed)
        except AssertionError as error:
            outcome = self._fail("wrong", request, f"{error}")
        except TwostrokeError as error:
            outcome = self._fail("failed", request, f"{error!r}")
        finally:
            asked.cancel()
            await asyncio.wait({asked})
        self.outcomes[outcome] += 1
        tokens = sum(map(len, answering.tokens))
        self.seen[request.name] = Seen(outcome, answering.begun, tokens, len(request.question.prompt))

    async def _outcome(
        self, request: Request, answering: Answering, asked: asyncio.Task[Routed], changed: asyncio.Event
    ) -> str:
        if await _left(request, answering, asked, changed):
            return "left"
        try:
            routed = await asked
        except DeadlineExceeded:
            if request.seconds >= 1:
                raise
            return "expired"
        routed.assert_same(await self._truth.of(request))
        return "complete"

    def _fail(self, outcome: str, request: Request, what: str) -> str:
        self.wrong.append(f"{request.name}: {what}; {request}")
        return outcome


async def _left(request: Request, answering: Answering, asked: asyncio.Task[Routed], changed: asyncio.Event) -> bool:
    """Wait for the moment at which the caller leaves; False, where the answer ended before, or it does not leave."""
    if request.leaves_in is not None:
        await asyncio.wait({asked}, timeout=request.leaves_in)
        return not asked.done()
    if request.leaves_at is None:
        return False
    asked.add_done_callback(lambda _: changed.set())
    while not asked.done() and answering.least < request.leaves_at:
        changed.clear()
        await changed.wait()
    return not asked.done()
