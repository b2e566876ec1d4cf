"""A prompt that does not fit is refused, unless the caller asked to drop its oldest part."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.support.cluster import Cluster, Shape, started, tiny_model
from twostroke.errors import ContextTooLong
from twostroke.types import Message, Started

CONTEXT = 512


@pytest.fixture
async def cluster(tmp_path) -> AsyncIterator[Cluster]:
    async with started(Shape(model=tiny_model(tmp_path / "model", max_positions=CONTEXT))) as running:
        yield running


async def test_a_raw_prompt_keeps_its_newest_tokens(cluster: Cluster) -> None:
    prompt = tuple(n % 250 for n in range(700))
    how = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    with pytest.raises(ContextTooLong):
        await cluster.client.complete(prompt, **how)
    cut = await cluster.client.complete(prompt, truncate=True, **how)
    newest = await cluster.client.complete(prompt[-(CONTEXT - 12) :], **how)
    assert cut.tokens == newest.tokens
    assert cut.usage.prompt_tokens == CONTEXT - 12


async def test_a_conversation_keeps_its_system_message_and_its_last_turn(cluster: Cluster) -> None:
    system, last = Message(role="system", content="Be kind."), Message(role="user", content="And now?")
    old = [Message(role=role, content=f"{at} " * 20) for at in range(8) for role in ("user", "assistant")]
    how = {"max_tokens": 8, "temperature": 0.0}
    with pytest.raises(ContextTooLong):
        await cluster.client.complete([system, *old, last], **how)
    events = [each async for each in cluster.client.generate([system, *old, last], truncate=True, **how)]
    assert isinstance(events[0], Started)
    assert 0 < events[0].prompt_tokens <= CONTEXT - 8
    assert events[0].truncated_tokens > 0
    # The same as if the caller had dropped the turns: the shortest beginning that fits.
    for kept in range(0, len(old), 2):
        try:
            shorter = [each async for each in cluster.client.generate([system, *old[kept:], last], **how)]
        except ContextTooLong:
            continue
        assert shorter[0].prompt_tokens == events[0].prompt_tokens
        break
    else:
        pytest.fail("no beginning fits")


async def test_the_http_door_says_how_much_was_dropped(cluster: Cluster) -> None:
    body = {"prompt": [n % 250 for n in range(700)], "max_tokens": 4, "truncation": "auto"}
    async with aiohttp.ClientSession() as http, http.post(f"{cluster.http}/v1/completions", json=body) as response:
        told = await response.json()
    assert response.status == 200
    assert told["usage"]["prompt_tokens_details"]["truncated_tokens"] == 700 - (CONTEXT - 4)


async def test_what_cannot_fit_at_all_is_refused_all_the_same(cluster: Cluster) -> None:
    with pytest.raises(ContextTooLong):
        await cluster.client.complete([Message(role="user", content="x" * 600)], max_tokens=4, truncate=True)
    with pytest.raises(ContextTooLong):
        await cluster.client.complete("hello", max_tokens=CONTEXT, truncate=True)


async def test_a_system_message_can_be_folded_into_the_users(cluster: Cluster) -> None:
    turns = [Message(role="system", content="Be kind."), Message(role="user", content="Hi")]
    apart = [each async for each in cluster.client.generate(turns, max_tokens=2)]
    folded = [each async for each in cluster.client.generate(turns, max_tokens=2, fold_system=True)]
    assert 0 < folded[0].prompt_tokens < apart[0].prompt_tokens
