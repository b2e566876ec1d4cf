"""Services on several hosts: answers are exact, also when the network between them is slow, lost or away."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.alone import Alone
from tests.support.cluster import tiny_model
from tests.support.hosts import Link, Network, network
from tests.support.processes import Service, at_work
from tests.support.routed import Answering, Question, Routed
from tests.support.spread import Spread, spread
from twostroke.client import Client
from twostroke.errors import DeadlineExceeded, Unavailable
from twostroke.types import SamplingParams, StopConditions

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG, SHORT = 2_000, 100  # tokens of a prompt
BLOCK_BYTES = 16 * 2 * 4 * 2 * 16 * 4  # tokens, keys and values, layers, heads, numbers, bytes
WRITTEN = 64  # tokens of an answer
SECONDS = 16.0  # for an answer over a broken network
WORKER = ("--weights", "f32", "--tokens-per-step", "64", "--lease-seconds", "2")
# A worker that says nothing for so long is lost. It says four times a second how it is, on a busy machine too.
ROUTER = ("--worker-silence-seconds", "3")

FAULTS: dict[str, Callable[[Link], None]] = {
    "slow": lambda link: link.slow("1mbit"),
    "cut": Link.cut,
    "down": Link.down,
    "delayed": lambda link: link.delay(200),
}
every_fault = pytest.mark.parametrize("fault", FAULTS)

_numbers = count(1)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    with network("a", "b") as made:
        yield made


@pytest.fixture(scope="module")
def model(hosts: Network, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"), layers=4)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(model: Path) -> AsyncIterator[Alone]:
    async with Alone.started(model) as engine:
        yield engine


@dataclass(frozen=True)
class Far:
    """One store, on host a; workers of both kinds on both hosts; and doors to some of them."""

    spread: Spread
    across: Client  # prefill on a, decode on b
    away: Client  # both on b
    either: Client  # prefill on a, decode on either

    @property
    def link(self) -> Link:
        """Between the two hosts."""
        return self.spread.network.link("a", "b")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(hosts: Network, model: Path) -> AsyncIterator[Far]:
    both = {"a": "a", "b": "a"}
    async with spread(hosts, model, stores={"a": ()}, prefill=both, decode=both, worker=WORKER) as running:
        routers = [("a", "b"), ("b", "b"), ("a", "ab")]
        yield Far(running, *[await running.router(prefill, decode, *ROUTER) for prefill, decode in routers])


@pytest_asyncio.fixture(loop_scope="module")
async def far(started: Far) -> AsyncIterator[Far]:
    """All of it, healed afterwards, and with nothing held then."""
    try:
        yield started
    finally:
        started.spread.network.heal()
    await started.spread.settled()


def fresh(length: int, written: int = WRITTEN) -> Question:
    """A question that nobody has seen."""
    dice = random.Random(next(_numbers))
    prompt = tuple(dice.randrange(256) for _ in range(length))
    return Question(prompt=prompt, stops=StopConditions(max_tokens=written, ignore_eos=True))


async def assert_exact(client: Client, alone: Alone, question: Question, seconds: float = SECONDS) -> Routed:
    """Ask, and hold the answer to that of one engine."""
    asked = Asked(client, question, seconds)
    asked.begin()
    return await asked.assert_exact(alone)


class Asked:
    """A question on its way."""

    def __init__(self, client: Client, question: Question, seconds: float = SECONDS) -> None:
        self._client = client
        self._seconds = seconds
        self._changed = asyncio.Event()
        self._answering = Answering(question, self._changed.set)
        self._task: asyncio.Task[Routed] | None = None

    def begin(self) -> None:
        """Ask."""
        asking = self._answering.asked(self._client, seconds=self._seconds)
        self._task = asyncio.create_task(asking)

    async def written(self, tokens: int) -> None:
        """Return when so much of the answer has come, and it is not at its end."""
        while self._answering.least < tokens:
            self._changed.clear()
            await self._changed.wait()
        assert self._task is not None
        assert not self._task.done()

    async def assert_exact(self, alone: Alone) -> Routed:
        """Hold the answer to that of one engine."""
        assert self._task is not None
        answer = await self._task
        answer.assert_same(await self._answering.question.alone(alone))
        return answer


async def test_prefill_on_one_host_and_decode_on_another_answer_as_one_engine(far: Far, alone: Alone) -> None:
    before = far.link.carried()
    seeded = replace(fresh(LONG), sampling=SamplingParams(temperature=0.8, seed=11), n=2)
    for question in (fresh(LONG), seeded):
        await assert_exact(far.across, alone, question)
    assert far.link.carried() - before > 2 * (LONG // 16) * BLOCK_BYTES


async def test_workers_away_from_their_store_find_there_what_others_stored(far: Far, alone: Alone) -> None:
    question = fresh(LONG)
    await assert_exact(far.across, alone, question)
    again = await assert_exact(far.away, alone, replace(question, prompt=(*question.prompt, *fresh(SHORT).prompt)))
    assert again.usage.cached.store >= LONG - 16
    stored = await assert_exact(far.away, alone, fresh(LONG))
    assert stored.usage.cached.total == 0


@every_fault
async def test_what_cannot_come_in_time_is_computed(far: Far, alone: Alone, fault: str) -> None:
    FAULTS[fault](far.link)
    await asyncio.gather(*(assert_exact(client, alone, fresh(LONG)) for client in (far.across, far.away)))


@every_fault
async def test_a_fault_in_the_middle_of_a_prompt_and_of_an_answer_costs_nothing_but_time(
    far: Far, alone: Alone, fault: str
) -> None:
    answer, prompt = Asked(far.across, fresh(SHORT, written=400)), Asked(far.across, fresh(LONG))
    answer.begin()
    await answer.written(100)
    prompt.begin()
    await at_work(far.spread.prefill["a"], steps=10)
    FAULTS[fault](far.link)
    for asked in (answer, prompt):
        await asked.assert_exact(alone)


async def test_streams_of_a_host_that_is_cut_off_go_on_at_another(far: Far, alone: Alone) -> None:
    asked = Asked(far.either, fresh(SHORT, written=1_000))
    asked.begin()
    await asked.written(100)
    busy = await first_at_work(far.spread.decode)
    far.spread.network.link("here", busy).cut()
    await asked.assert_exact(alone)


async def test_where_nobody_else_can_answer_the_caller_is_told_in_time(far: Far, alone: Alone) -> None:
    asked = Asked(far.across, fresh(SHORT, written=1_000), seconds=5.0)
    asked.begin()
    await asked.written(100)
    far.spread.network.link("here", "b").cut()
    with pytest.raises((DeadlineExceeded, Unavailable)):
        await asked.assert_exact(alone)
    far.spread.network.heal()
    await assert_exact(far.across, alone, fresh(SHORT))


async def first_at_work(workers: Mapping[str, Service]) -> str:
    """The host of the worker that works."""
    working = {asyncio.create_task(at_work(worker, steps=1)): host for host, worker in workers.items()}
    try:
        done, _ = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
        (task,) = done
        await task
        return working[task]
    finally:
        for task in working:
            task.cancel()
        await asyncio.wait(working)
