"""What a request may do with stored blocks: its own pass from prefill to decode all the same, and no answer changes."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.alone import Alone
from tests.support.cluster import Cluster, Shape, started, tiny_model
from twostroke.kv.blocks import TransportChoice
from twostroke.types import CachePolicy, Delta

PROMPT = tuple(range(1, 101))  # six blocks of 16, and four tokens
LONGER = (*PROMPT, *range(150, 214))
PAGES = 24
HOW = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}

both = pytest.mark.parametrize("transport", [TransportChoice.SHARED_MEMORY, TransportChoice.GRPC])


@both
@pytest.mark.parametrize("policy", [CachePolicy.READ_ONLY, CachePolicy.BYPASS])
async def test_what_shall_not_be_stored_is_handed_over_and_leaves_nothing(
    tmp_path, policy: CachePolicy, transport: TransportChoice
) -> None:
    model = tiny_model(tmp_path / "model")
    async with started(Shape(model=model, transport=transport)) as cluster:
        steps = cluster.decode[0].engine.load().steps
        answer = await cluster.client.complete(PROMPT, cache_policy=policy, **HOW)
        await cluster.settled()
        assert cluster.decode[0].engine.load().steps - steps == 39  # one a token: nothing of the prompt was run again
        stats = cluster.node.stats()
        assert (stats.free, stats.committed, stats.namespaces) == (stats.slots, 0, 0)
        assert (await cluster.client.complete(PROMPT, **HOW)).tokens == answer.tokens
        await cluster.settled()
        assert cluster.node.stats().committed > 6  # the prompt's blocks and the answer's


async def test_a_request_that_stores_nothing_uses_what_is_stored(tmp_path) -> None:
    model = tiny_model(tmp_path / "model")
    async with Alone.started(model) as alone:
        memory = PAGES * alone.engine.format.block_bytes
    async with started(Shape(model=model, kv_bytes=f"{memory // 1024}KiB")) as cluster:
        await cluster.client.complete(PROMPT, **HOW)
        await cluster.settled()
        before = cluster.node.stats().committed
        flood = tuple(
            at % 250 for at in range(16 * PAGES - 50)
        )  # takes every page of the workers, and no slot for long
        await cluster.client.complete(flood, cache_policy=CachePolicy.BYPASS, **HOW)
        await cluster.settled()
        answer = await cluster.client.complete(LONGER, cache_policy=CachePolicy.READ_ONLY, **HOW)
        assert (answer.usage.cached.local, answer.usage.cached.store) == (0, 96)
        await cluster.settled()
        assert cluster.node.stats().committed == before
        assert (await cluster.client.complete(LONGER, **HOW)).tokens == answer.tokens


async def test_choices_of_a_request_that_stores_nothing_share_what_was_handed_over(tmp_path) -> None:
    async with started(Shape(model=tiny_model(tmp_path / "model"), decode=2)) as cluster:
        ours = await choices(cluster, CachePolicy.READ_ONLY)
        await cluster.settled()
        assert cluster.node.stats().committed == 0
        assert ours == await choices(cluster, CachePolicy.READ_WRITE)


async def test_equal_requests_at_once_that_store_nothing_are_answered_alike_and_leave_nothing(tmp_path) -> None:
    async with started(Shape(model=tiny_model(tmp_path / "model"), prefill=2, decode=2)) as cluster:
        policies = [CachePolicy.READ_ONLY] * 3 + [CachePolicy.BYPASS] * 3
        told = await asyncio.gather(*(cluster.client.complete(LONGER, cache_policy=each, **HOW) for each in policies))
        assert len({answer.text for answer in told}) == 1
        await cluster.settled()
        assert cluster.node.stats().committed == 0


async def choices(cluster: Cluster, policy: CachePolicy) -> dict[int, list[int]]:
    told: dict[int, list[int]] = {}
    how = {**HOW, "temperature": 1.0, "seed": 3, "n": 3, "cache_policy": policy}
    async for event in cluster.client.generate(PROMPT, **how):
        if isinstance(event, Delta):
            told.setdefault(event.choice, []).extend(token.id for token in event.tokens)
    return told
