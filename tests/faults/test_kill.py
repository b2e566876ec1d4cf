"""Any process may be killed at any moment: no token is lost or doubled, usage is counted once, all comes back."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.alone import Alone, Told
from tests.support.cluster import tiny_model
from tests.support.processes import Processes, Service, running
from tests.support.routed import Answering, Question, Routed
from tests.support.settling import at_work
from twostroke.errors import DeadlineExceeded, Unavailable
from twostroke.types import FinishReason, SamplingParams, StopConditions

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG, SHORT = 2_000, 100  # tokens of a prompt
WRITTEN = 400  # tokens of an answer, some milliseconds each
MIDDLE = 100  # tokens after which an answer is in the middle
# A short step keeps a long prompt under way for long; a lease that nobody renews soon ends.
WORKER = ("--weights", "f32", "--tokens-per-step", "16", "--max-running", "16", "--lease-seconds", "1")

_numbers = count(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"), layers=4)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(model: Path) -> AsyncIterator[Alone]:
    async with Alone.started(model) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Processes]:
    async with running(tmp_path_factory.mktemp("processes"), model, *WORKER) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def whole(processes: Processes) -> AsyncIterator[Processes]:
    """All of it, with nothing held afterwards."""
    yield processes
    for service in reversed(processes.services):
        if not service.runs:
            await service.start()
    await processes.settled()


@dataclass
class Asked:
    """A question on its way through a router."""

    name: str
    answering: Answering
    truth: list[Told]
    task: asyncio.Task[Routed]


class Crowd:
    """Questions of every kind at once: greedy, two seeded choices, and a stop string that is long half matched."""

    def __init__(self, processes: Processes, router: Service) -> None:
        self._processes = processes
        self._client = processes.clients[router]
        self._changed = asyncio.Event()
        self.asked: list[Asked] = []

    async def ask(self, alone: Alone, length: int) -> None:
        """Ask all kinds, each about a prompt of its own that nobody has seen."""
        stops = StopConditions(max_tokens=WRITTEN, ignore_eos=True)
        greedy = Question(prompt=fresh_prompt(length), stops=stops)
        seeded = Question(
            prompt=fresh_prompt(length), stops=stops, sampling=SamplingParams(temperature=0.8, seed=11), n=2
        )
        (free,) = await replace(greedy, prompt=(held := fresh_prompt(length))).alone(alone)
        stopped = replace(greedy, prompt=held, stop_strings=(free.text[MIDDLE // 2 : WRITTEN // 2],))
        truths = await asyncio.gather(*(question.alone(alone) for question in (greedy, seeded, stopped)))
        assert truths[2][0].text == free.text[: MIDDLE // 2]
        for question, truth in zip((greedy, seeded, stopped), truths, strict=True):
            name, answering = f"question-{next(_numbers)}", Answering(question, self._changed.set)
            task = asyncio.create_task(answering.asked(self._client, request_id=name))
            self.asked.append(Asked(name, answering, truth, task))

    async def middle(self) -> None:
        """Return when every choice is in the middle of its answer, the stop string half matched."""
        while min(each.answering.least for each in self.asked) < MIDDLE:
            self._changed.clear()
            await self._changed.wait()
            assert not any(each.task.done() for each in self.asked)
        assert len(self.asked[2].answering.texts[0]) <= MIDDLE // 2 < self.asked[2].answering.least

    async def assert_undisturbed(self) -> list[int]:
        """Hold all answers to those of one engine; answers how many attempts each took beyond those always needed."""
        extra = []
        for each in self.asked:
            (await each.task).assert_same(each.truth)
            record = self._processes.record(each.name)
            assert record["outcome"] == "completed"
            assert record["completion_tokens"] == sum(len(told.ids) for told in each.truth)
            assert record["prompt_tokens"] == len(each.answering.question.prompt)
            extra.append(record["attempts"] - 1 - each.answering.question.n)
        return extra


def fresh_prompt(length: int) -> tuple[int, ...]:
    dice = random.Random(next(_numbers))
    return tuple(dice.randrange(256) for _ in range(length))


async def test_a_killed_prefill_worker_is_replaced_by_another(whole: Processes, alone: Alone) -> None:
    crowd = Crowd(whole, whole.router)
    await crowd.ask(alone, LONG)
    await at_work(whole.prefill[0], steps=20)
    await whole.prefill[0].kill()
    assert not any(each.answering.least for each in crowd.asked)
    assert sum(await crowd.assert_undisturbed()) >= 1


async def test_callers_that_leave_a_killed_prefill_worker_leave_nothing_held(whole: Processes, alone: Alone) -> None:
    crowd = Crowd(whole, whole.lone)
    await crowd.ask(alone, LONG)
    await at_work(whole.prefill[0], steps=20)
    await whole.prefill[0].kill()
    for each in crowd.asked:
        each.task.cancel()
    await asyncio.wait([each.task for each in crowd.asked])
    await whole.prefill[0].start()
    await whole.settled()
    again = Crowd(whole, whole.lone)
    await again.ask(alone, SHORT)
    assert await again.assert_undisturbed() == [0, 0, 0]


async def test_without_a_prefill_worker_decode_runs_the_prompt(whole: Processes, alone: Alone) -> None:
    crowd = Crowd(whole, whole.lone)
    await crowd.ask(alone, LONG)
    await at_work(whole.prefill[0], steps=20)
    await whole.prefill[0].kill()
    assert not any(each.answering.least for each in crowd.asked)
    await crowd.assert_undisturbed()


async def test_a_killed_decode_worker_is_replaced_by_another(whole: Processes, alone: Alone) -> None:
    crowd = Crowd(whole, whole.router)
    await crowd.ask(alone, SHORT)
    await crowd.middle()
    await whole.decode[0].kill()
    assert sum(await crowd.assert_undisturbed()) >= 1


async def test_the_only_decode_worker_is_waited_for_until_it_is_back(whole: Processes, alone: Alone) -> None:
    crowd = Crowd(whole, whole.lone)
    await crowd.ask(alone, SHORT)
    await crowd.middle()
    await whole.decode[0].kill()
    with pytest.raises(DeadlineExceeded):
        await whole.clients[whole.lone].complete("short of time", timeout=0.5)
    await whole.decode[0].start()
    assert await crowd.assert_undisturbed() == [1, 2, 1]


async def test_a_killed_store_costs_nothing_but_time_and_is_used_again_when_it_is_back(
    whole: Processes, alone: Alone
) -> None:
    crowd = Crowd(whole, whole.lone)
    await crowd.ask(alone, SHORT)
    await crowd.middle()
    late = Crowd(whole, whole.lone)
    await late.ask(alone, LONG)
    await at_work(whole.prefill[0], steps=20)
    await whole.kvstore.kill()
    await crowd.assert_undisturbed()
    await late.assert_undisturbed()

    await whole.kvstore.start()
    again = Question(prompt=fresh_prompt(LONG), stops=StopConditions(max_tokens=64, ignore_eos=True))
    truth = await again.alone(alone)
    first = await Answering(again).asked(whole.clients[whole.lone])
    first.assert_same(truth)
    await whole.settled()
    turn = replace(again, prompt=(*again.prompt, *truth[0].ids, *fresh_prompt(8)))
    for router in (whole.lone, whole.router):
        second = await Answering(turn).asked(whole.clients[router])
        second.assert_same(await turn.alone(alone))
        assert second.usage.cached.total >= LONG


async def test_a_killed_router_leaves_a_clear_error_and_nothing_held(whole: Processes, alone: Alone) -> None:
    crowd = Crowd(whole, whole.lone)
    await crowd.ask(alone, SHORT)
    await crowd.middle()
    waiting = asyncio.create_task(whole.clients[whole.lone].complete(fresh_prompt(LONG), max_tokens=4))
    await at_work(whole.prefill[0], steps=20)
    await whole.lone.kill()
    for each in crowd.asked:
        with pytest.raises(Unavailable):
            await each.task
        assert each.answering.least < WRITTEN
    with contextlib.suppress(Unavailable):  # nothing was generated yet: the client tries a few times more
        await waiting
    await whole.settled()


@pytest.mark.parametrize("how", ["SIGTERM", "the end of standard input"])
async def test_a_worker_told_to_stop_finishes_its_answers(whole: Processes, alone: Alone, how: str) -> None:
    crowd = Crowd(whole, whole.lone)
    await crowd.ask(alone, SHORT)
    await crowd.middle()
    for worker in (whole.decode[0], whole.prefill[0]):
        worker.terminate() if how == "SIGTERM" else worker.close_stdin()
    assert [await worker.ended() for worker in (whole.decode[0], whole.prefill[0])] == [0, 0]
    assert await crowd.assert_undisturbed() == [0, 0, 0]
    assert {told.finish for each in crowd.asked[:2] for told in each.truth} == {FinishReason.LENGTH}
