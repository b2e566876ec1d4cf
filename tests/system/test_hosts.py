"""Services on several hosts: answers are exact, also when the network between them is slow, lost or away."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.alone import Alone
from tests.support.cluster import tiny_model
from tests.support.hosts import Link, Network, network, why_no_delay
from tests.support.redis import RedisServer, redis_server
from tests.support.routed import Answering, Question, Routed
from tests.support.settling import at_work, first_at_work, store_status
from tests.support.spread import Spread, spread
from twostroke.client import Client
from twostroke.errors import DeadlineExceeded, Unavailable
from twostroke.types import SamplingParams, StopConditions
from twostroke.v1 import kvstore_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG, SHORT = 2_000, 100  # tokens of a prompt
WHOLE = LONG // 16 * 16  # of them in full blocks
TOKEN_BYTES = 2 * 4 * 2 * 16 * 4  # keys and values, layers, heads, numbers, bytes of each
WRITTEN, MIDDLE = 64, 100  # tokens of an answer; tokens after which a longer one is in the middle
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

_numbers = count(1)


@pytest.fixture(params=FAULTS)
def fault(request: pytest.FixtureRequest) -> str:
    if request.param == "delayed" and (reason := why_no_delay()):
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    with network("a", "b", "c") as made:
        yield made


@pytest.fixture(scope="module")
def model(hosts: Network, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"), layers=4)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(model: Path) -> AsyncIterator[Alone]:
    async with Alone.started(model) as engine:
        yield engine


@pytest.fixture(scope="module")
def directory(hosts: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis"), hosts["c"]) as server:
        server.start()
        yield server


@dataclass(frozen=True)
class Far:
    """A store and a prefill worker on hosts a and c, a store and a decode worker on host b, and doors to some of them.

    Host c has a decode worker that uses the store of host a.
    """

    spread: Spread
    across: Client  # prefill on a, decode on b
    third: Client  # prefill on c, decode on b
    away: Client  # prefill on a, decode on c by way of the store on a
    either: Client  # prefill on a, decode on b or c

    @property
    def links(self) -> list[Link]:
        """Between the hosts; those to the routers, here, are others."""
        return self.spread.network.among("a", "b", "c")

    def strike(self, fault: str) -> None:
        """Let a fault come over all links between the hosts."""
        for link in self.links:
            FAULTS[fault](link)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(hosts: Network, model: Path, directory: RedisServer) -> AsyncIterator[Far]:
    prefill, decode = {"a": "a", "c": "c"}, {"b": "b", "c": "a"}
    store = ("--redis-url", directory.url, "--redis-lookup-seconds", "2")  # the machine may be busy
    async with spread(
        hosts, model, stores="abc", prefill=prefill, decode=decode, store=store, worker=WORKER
    ) as running:
        doors = (("a", "b"), ("c", "b"), ("a", "c"), ("a", "bc"))
        yield Far(running, *await asyncio.gather(*(running.router(*door, *ROUTER) for door in doors)))


@pytest_asyncio.fixture(loop_scope="module")
async def far(started: Far) -> AsyncIterator[Far]:
    """All of it, healed afterwards, and with nothing held then."""
    try:
        yield started
    finally:
        started.spread.network.heal()
    await started.spread.settled()


class Asked:
    """A question on its way."""

    def __init__(self, client: Client, question: Question, seconds: float = SECONDS) -> None:
        self._changed = asyncio.Event()
        self._answering = Answering(question, self._changed.set)
        self._task = asyncio.create_task(self._answering.asked(client, seconds=seconds))
        self._task.add_done_callback(lambda _: self._changed.set())

    async def written(self, tokens: int) -> None:
        """Return when so much of the answer has come; fails when it is at its end by then."""
        while self._answering.least < tokens or self._task.done():
            assert not self._task.done(), self._task
            self._changed.clear()
            await self._changed.wait()

    async def assert_exact(self, alone: Alone) -> Routed:
        """Hold the answer to that of one engine."""
        answer = await self._task
        answer.assert_same(await self._answering.question.alone(alone))
        return answer


def fresh(length: int, written: int = WRITTEN) -> Question:
    """A question that nobody has seen."""
    dice = random.Random(next(_numbers))
    prompt = tuple(dice.randrange(256) for _ in range(length))
    return Question(prompt=prompt, stops=StopConditions(max_tokens=written, ignore_eos=True))


def longer(question: Question) -> Question:
    """The same beginning, and more."""
    return replace(question, prompt=(*question.prompt, *fresh(SHORT).prompt))


def assert_fetched(now: kvstore_pb2.PeerStatus, before: kvstore_pb2.PeerStatus) -> None:
    """A node has got the blocks of a long prompt from another one, from arena to arena."""
    assert now.fetched_over["tcp"] - before.fetched_over["tcp"] >= WHOLE // 16
    assert now.fetched_bytes - before.fetched_bytes >= WHOLE * TOKEN_BYTES


async def test_prefill_on_one_host_and_decode_on_another_answer_as_one_engine(far: Far, alone: Alone) -> None:
    node, link = far.spread.stores["b"], far.spread.network.link("a", "b")
    seeded = replace(fresh(LONG), sampling=SamplingParams(temperature=0.8, seed=11), n=2)
    for question in (fresh(LONG), seeded):
        before, carried = (await store_status(node)).peers, link.carried()
        await Asked(far.across, question).assert_exact(alone)
        assert_fetched((await store_status(node)).peers, before)
        assert link.carried() - carried > WHOLE * TOKEN_BYTES


async def test_another_host_loads_what_one_host_has_computed(far: Far, alone: Alone) -> None:
    question = fresh(LONG)
    await Asked(far.across, question).assert_exact(alone)
    await far.spread.registered()
    before = (await store_status(far.spread.stores["c"])).peers
    answer = await Asked(far.third, longer(question)).assert_exact(alone)
    assert answer.usage.cached.store >= WHOLE
    assert_fetched((await store_status(far.spread.stores["c"])).peers, before)


async def test_a_worker_may_use_the_store_of_another_host(far: Far, alone: Alone) -> None:
    link = far.spread.network.link("a", "c")
    before = link.carried()
    await Asked(far.away, fresh(LONG)).assert_exact(alone)
    assert link.carried() - before > WHOLE * TOKEN_BYTES


async def test_what_cannot_come_in_time_is_computed(far: Far, alone: Alone, fault: str) -> None:
    question = fresh(LONG)
    await Asked(far.across, question).assert_exact(alone)
    await far.spread.registered()
    before = [link.carried() for link in far.links]
    far.strike(fault)
    for asked in (Asked(far.across, fresh(LONG)), Asked(far.third, longer(question)), Asked(far.away, fresh(LONG))):
        await asked.assert_exact(alone)
    carried = [link.carried() - bytes_ for link, bytes_ in zip(far.links, before, strict=True)]
    assert fault == "delayed" or max(carried) < WHOLE * TOKEN_BYTES


async def test_a_fault_in_the_middle_of_a_prompt_and_of_an_answer_costs_nothing_but_time(
    far: Far, alone: Alone, fault: str
) -> None:
    answer = Asked(far.across, fresh(SHORT, written=4 * MIDDLE))
    await answer.written(MIDDLE)
    prompt = Asked(far.across, fresh(LONG))
    await at_work(far.spread.prefill["a"], steps=10)
    far.strike(fault)
    for asked in (answer, prompt):
        await asked.assert_exact(alone)


async def test_a_fetch_that_is_cut_off_in_the_middle_is_a_miss(far: Far, alone: Alone) -> None:
    link, node = far.spread.network.link("a", "b"), far.spread.stores["b"]
    link.slow("1mbit")
    asked = Asked(far.across, fresh(LONG))
    async with asyncio.timeout(SECONDS):
        while not (await store_status(node)).peers.fetching:
            await asyncio.sleep(0.01)  # nobody is told when a fetch begins
    link.cut()
    await asked.assert_exact(alone)


async def test_streams_of_a_host_that_is_cut_off_go_on_at_another(far: Far, alone: Alone) -> None:
    asked = Asked(far.either, fresh(SHORT, written=15 * MIDDLE))
    await asked.written(MIDDLE)
    busy = await first_at_work(far.spread.decode)
    far.spread.network.link("here", busy).cut()
    await asked.assert_exact(alone)


async def test_where_nobody_else_can_answer_the_caller_is_told_in_time(far: Far, alone: Alone) -> None:
    asked = Asked(far.across, fresh(SHORT, written=10 * MIDDLE), seconds=5.0)
    await asked.written(MIDDLE)
    far.spread.network.link("here", "b").cut()
    with pytest.raises((DeadlineExceeded, Unavailable)):
        await asked.assert_exact(alone)
    far.spread.network.heal()
    await Asked(far.across, fresh(SHORT)).assert_exact(alone)
