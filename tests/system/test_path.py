"""One request through all four services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.support.cluster import Cluster, Shape, started, tiny_model
from twostroke.kv.blocks import TransportChoice
from twostroke.types import CachePolicy, ChoiceFinished, Delta, FinishReason, Message, Started, Usage


@pytest.fixture
async def cluster(tmp_path) -> AsyncIterator[Cluster]:
    async with started(Shape(model=tiny_model(tmp_path / "model"))) as running:
        yield running


async def test_a_prompt_comes_back_as_events_in_order(cluster: Cluster) -> None:
    events = [event async for event in cluster.client.generate("Once upon a time", max_tokens=20, temperature=0.0)]
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Usage)
    assert isinstance(events[-2], ChoiceFinished)
    deltas = [event for event in events if isinstance(event, Delta)]
    assert [delta.sequence for delta in deltas] == list(range(1, len(deltas) + 1))
    assert events[-1].completion_tokens == sum(len(delta.tokens) for delta in deltas) == deltas[-1].total_tokens


async def test_a_second_turn_finds_the_first_in_the_cache(cluster: Cluster) -> None:
    turns = [Message(role="user", content="Tell me of the sea, the wind and the long way home.")]
    first = await cluster.client.complete(turns, max_tokens=40, temperature=0.0, ignore_eos=True)
    turns += [Message(role="assistant", content=first.text), Message(role="user", content="And then?")]
    second = await cluster.client.complete(turns, max_tokens=8, temperature=0.0)
    assert first.usage.cached.total == 0
    assert second.usage.cached.total >= first.usage.prompt_tokens - 16


async def test_blocks_that_decode_filled_are_found_by_prefill(cluster: Cluster) -> None:
    prompt = tuple(range(1, 41))
    first = await cluster.client.complete(prompt, max_tokens=64, temperature=0.0, ignore_eos=True)
    longer = (*prompt, *(token.id for token in first.tokens))
    await cluster.settled()
    second = await cluster.client.complete(longer, max_tokens=4, temperature=0.0, ignore_eos=True)
    assert second.usage.cached.store >= 32


@pytest.mark.parametrize("transport", [TransportChoice.SHARED_MEMORY, TransportChoice.GRPC])
async def test_decode_takes_the_prompt_from_the_store(tmp_path, transport: TransportChoice) -> None:
    model = tiny_model(tmp_path / "model")
    async with started(Shape(model=model, transport=transport)) as cluster:
        prompt = tuple(range(1, 101))
        steps = cluster.decode[0].engine.load().steps
        answer = await cluster.client.complete(prompt, max_tokens=5, temperature=0.0, ignore_eos=True)
        assert answer.finish_reason is FinishReason.LENGTH
        await cluster.settled()
        assert cluster.decode[0].engine.load().steps - steps == 4  # one a token: nothing of the prompt was run again


async def test_two_of_each_worker_share_the_work(tmp_path) -> None:
    async with started(Shape(model=tiny_model(tmp_path / "model"), prefill=2, decode=2)) as cluster:
        before = [worker.engine.load().steps for worker in cluster.workers]
        for start in range(4):
            prompt = tuple(range(start * 40 + 1, start * 40 + 41))
            await cluster.client.complete(prompt, max_tokens=4, temperature=0.0, ignore_eos=True)
        await cluster.settled()
        assert all(worker.engine.load().steps > was for worker, was in zip(cluster.workers, before, strict=True))


async def test_the_http_door_gives_the_same_answer(cluster: Cluster) -> None:
    answer = await cluster.client.complete("Once upon a time", max_tokens=20, temperature=0.0, ignore_eos=True)
    body = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    async with aiohttp.ClientSession() as http, http.post(f"{cluster.http}/v1/completions", json=body) as response:
        told = await response.json()
    assert told["choices"][0]["text"] == answer.text
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_callers_that_choose_the_same_request_id_do_not_disturb_each_other(cluster: Cluster) -> None:
    asked = (
        cluster.client.complete(prompt, max_tokens=30, temperature=0.0, ignore_eos=True, request_id="same")
        for prompt in ("one", "two", "three")
    )
    told = await asyncio.gather(*asked)
    assert [len(each.tokens) for each in told] == [30, 30, 30]


async def test_a_request_that_bypasses_the_cache_shares_nothing(cluster: Cluster) -> None:
    prompt = tuple(range(1, 101))
    how = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, "cache_policy": CachePolicy.BYPASS}
    first = await cluster.client.complete(prompt, **how)
    again = await cluster.client.complete(prompt, **how)
    shared = await cluster.client.complete(prompt, **{**how, "cache_policy": CachePolicy.READ_WRITE})
    assert [each.usage.cached.total for each in (first, again, shared)] == [0, 0, 0]
    assert first.tokens == again.tokens == shared.tokens


async def test_a_salt_narrows_who_shares(cluster: Cluster) -> None:
    prompt = tuple(range(1, 101))
    how = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
    cached = [
        (await cluster.client.complete(prompt, cache_salt=salt, **how)).usage.cached.total
        for salt in ("", "a", "b", "a", "")
    ]
    assert cached == [0, 0, 0, 99, 99]
