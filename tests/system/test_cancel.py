"""A caller that leaves gives everything back, wherever the request was."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path

import aiohttp
import pytest

from tests.support.cluster import Cluster, Shape, started, tiny_model
from twostroke.cluster import Role
from twostroke.errors import DeadlineExceeded
from twostroke.handoff import First, Handover, PrefillOrder, Progress
from twostroke.telemetry import Span
from twostroke.types import Delta, Started

LONG = tuple(n % 250 for n in range(3_000))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def cluster(model: Path) -> AsyncIterator[Cluster]:
    # Chunks of 16 make a long prompt many steps, so that leaving falls into the middle of it.
    async with started(Shape(model=model, max_chunk=16)) as running:
        yield running


async def assert_unaffected(cluster: Cluster) -> None:
    """A follow-up request works, and nothing of those before is held."""
    answer = await cluster.client.complete("after", max_tokens=4, temperature=0.0, ignore_eos=True)
    assert len(answer.tokens) == 4
    await cluster.settled()


async def test_leaving_during_prefill(cluster: Cluster) -> None:
    async with aclosing(cluster.client.generate(LONG, max_tokens=50)) as events:
        assert isinstance(await anext(events), Started)
        while cluster.prefill[0].engine.load().steps < 5:
            await asyncio.sleep(0)
    await assert_unaffected(cluster)
    assert cluster.prefill[0].engine.load().steps < 150


async def test_leaving_at_the_first_token(cluster: Cluster) -> None:
    async with aclosing(cluster.client.generate(LONG[:400], max_tokens=2_000, ignore_eos=True)) as events:
        async for event in events:
            if isinstance(event, Delta):
                break
    await assert_unaffected(cluster)
    assert cluster.decode[0].engine.load().steps < 1_000


async def test_leaving_while_the_ticket_is_on_its_way(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    (member,) = cluster.doors.fleet.available(Role.PREFILL)
    run, gate = member.prefill, cluster.gates[0]
    handed_over = asyncio.Event()

    async def unread(
        order: PrefillOrder, deadline: float, span: Span
    ) -> AsyncGenerator[Progress | First | Handover, None]:
        before = gate.open_calls
        async with aclosing(run(order, deadline, span)) as events:
            async for event in events:
                yield event
                if isinstance(event, First):
                    while gate.open_calls > before:  # the worker's part ends, with all its answers under way
                        await asyncio.sleep(0)
                    handed_over.set()
                    await asyncio.Event().wait()

    monkeypatch.setattr(member, "prefill", unread)
    asking = asyncio.create_task(cluster.client.complete("hello there, ticket", max_tokens=50, ignore_eos=True))
    await handed_over.wait()
    assert cluster.node.stats().leases == 1
    asking.cancel()
    await asyncio.wait({asking})
    monkeypatch.undo()
    await assert_unaffected(cluster)


async def test_leaving_during_decode(cluster: Cluster) -> None:
    async with aclosing(cluster.client.generate("hello", max_tokens=3_000, ignore_eos=True, n=3)) as events:
        async for event in events:
            if isinstance(event, Delta) and event.total_tokens > 10:
                break
    await assert_unaffected(cluster)
    assert cluster.decode[0].engine.load().steps < 1_500


async def test_leaving_while_waiting_for_a_place(model: Path) -> None:
    async with started(Shape(model=model, max_running=1)) as cluster:
        first = asyncio.create_task(cluster.client.complete("one", max_tokens=300, ignore_eos=True))
        others = [
            asyncio.create_task(cluster.client.complete(f"other {n}", max_tokens=300, ignore_eos=True))
            for n in range(4)
        ]
        while cluster.decode[0].engine.load().waiting < 2:
            await asyncio.sleep(0)
        for other in others:
            other.cancel()
        await asyncio.wait(others)
        assert len((await first).tokens) == 300
        await assert_unaffected(cluster)


async def test_twenty_streams_that_close_their_sockets(cluster: Cluster) -> None:
    body = {"prompt": "hello there", "max_tokens": 4_000, "stream": True, "ignore_eos": True}

    async def leave(http: aiohttp.ClientSession) -> None:
        async with http.post(f"{cluster.http}/v1/completions", json=body) as response:
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"data: ") and json.loads(line[6:])["choices"][0]["text"]:
                    response.close()
                    return

    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(leave(http) for _ in range(20)))
    await assert_unaffected(cluster)
    assert cluster.decode[0].engine.load().steps < 2_000


async def test_a_client_that_gives_up_on_a_whole_answer(cluster: Cluster) -> None:
    body = {"prompt": "hello there", "max_tokens": 4_000, "ignore_eos": True}
    async with aiohttp.ClientSession() as http:
        asking = asyncio.create_task(http.post(f"{cluster.http}/v1/completions", json=body))
        while not cluster.decode[0].engine.load().running:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
    await assert_unaffected(cluster)
    assert cluster.decode[0].engine.load().steps < 2_000


async def test_a_deadline_ends_the_work_in_every_service(cluster: Cluster) -> None:
    with pytest.raises(DeadlineExceeded):
        await cluster.client.complete("hello", max_tokens=4_000, ignore_eos=True, timeout=0.3)
    await assert_unaffected(cluster)


async def test_more_than_the_waiting_list_holds_is_refused_with_a_time_to_come_back(model: Path) -> None:
    body = {"max_tokens": 2, "ignore_eos": True}
    async with started(Shape(model=model, max_running=1, max_waiting=1)) as cluster, aiohttp.ClientSession() as http:

        async def ask(start: int) -> tuple[int, str | None]:
            prompt = list(LONG[start : start + 900])
            async with http.post(f"{cluster.http}/v1/completions", json={**body, "prompt": prompt}) as response:
                await response.read()
                return response.status, response.headers.get("Retry-After")

        answers = await asyncio.gather(*(ask(start) for start in range(12)))
        assert {status for status, _ in answers} == {200, 429}
        assert all(after is not None for status, after in answers if status == 429)
        await assert_unaffected(cluster)


async def test_streams_beyond_what_workers_take_are_refused_before_they_begin(model: Path) -> None:
    body = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True, "stream": True}
    async with started(Shape(model=model, max_running=2, max_waiting=2)) as cluster, aiohttp.ClientSession() as http:

        async def ask() -> tuple[int, bool]:
            async with http.post(f"{cluster.http}/v1/completions", json=body) as response:
                text = await response.text()
                return response.status, "[DONE]" in text

        answers = await asyncio.gather(*(ask() for _ in range(30)))
        assert {status for status, _ in answers} == {200, 429}
        assert all(done == (status == 200) for status, done in answers)  # what began was finished
        await assert_unaffected(cluster)
