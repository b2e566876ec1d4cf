"""What of a prompt was cached: the same keys everywhere, the last token computed, one count wherever it lay."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.router.member import Member
from services.router.prompt import prepare
from tests.support.alone import Alone
from tests.support.cluster import Shape, started, tiny_model
from tests.support.pairs import GREEDY, Pair, fresh_prompt, ids, paired
from twostroke.cluster import Role
from twostroke.handoff import First, Handover
from twostroke.types import CachedTokens, GenerateRequest, RequestContext

BLOCK = 16


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Pair, Pair]]:
    """Two prefill workers beside one decode worker; both pairs share that and the store."""
    model = tiny_model(tmp_path / "model")
    async with (
        Alone.started(model) as alone,
        started(Shape(model=model, prefill=2)) as cluster,
        paired(cluster, alone) as second,
    ):
        first = Member(cluster.doors.fleet.members[0].address, Role.PREFILL, 10.0)
        first.info = await first.introduce()
        yield replace(second, prefill=first), second
        await first.close()


async def cached(pair: Pair, prompt: tuple[int, ...]) -> CachedTokens:
    """What a prefill worker had of a prompt, whose answer must be that of a cold one."""
    order = pair.order(prompt)
    *_, first, _, handover = await pair.prefilled(order)
    assert isinstance(first, First)
    assert isinstance(handover, Handover)
    assert handover.ticket is not None
    assert sum(block.tokens for block in handover.ticket.blocks) == len(prompt)
    ((token, _),) = first.tokens
    order = replace(order, emitted=(token.id,), ticket=handover.ticket)
    news = await pair.decoded(order)
    pair.give_up(order)
    assert (token.id, *ids(news)) == await pair.truth(prompt)
    return first.cached


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
async def test_of_a_prompt_that_is_cached_to_its_end_the_last_token_is_computed(
    pair: tuple[Pair, Pair], length: int
) -> None:
    one, other = pair
    prompt, stored = fresh_prompt(length), (length - 1) // BLOCK * BLOCK
    assert await cached(one, prompt) == CachedTokens(local=0, store=0)
    assert await cached(one, prompt) == CachedTokens(local=length - 1, store=0)
    assert await cached(other, prompt) == CachedTokens(local=0, store=stored)
    assert await cached(other, prompt) == CachedTokens(local=length - 1, store=0)


async def test_a_prompt_half_here_and_half_in_the_store_counts_each_half_once(pair: tuple[Pair, Pair]) -> None:
    one, other = pair
    prompt = fresh_prompt(4 * BLOCK)
    await cached(other, prompt[: 2 * BLOCK])
    await cached(one, prompt)
    assert await cached(other, prompt) == CachedTokens(local=2 * BLOCK, store=BLOCK)


async def test_router_workers_and_store_know_a_prompt_by_the_same_keys(tmp_path: Path) -> None:
    async with started(Shape(model=tiny_model(tmp_path / "model"))) as cluster:
        prompt, full = fresh_prompt(100), 6
        (prefill, decode), served = cluster.workers, cluster.doors.fleet.model
        assert served is not None
        seen: set[tuple[bytes, ...]] = set()
        for salt in ("", "a", "b"):
            context = RequestContext(request_id="any", salt=salt)
            keys = prepare(served, GenerateRequest(context=context, prompt=prompt, sampling=GREEDY)).keys
            assert await prefill.store.lookup(keys) == 0
            found = [
                (await cluster.client.complete(prompt, cache_salt=salt, max_tokens=2, temperature=0.0, ignore_eos=True))
                for _ in range(2)
            ]
            await cluster.settled()
            predicted = cluster.doors.dispatch._placer._index.matched(cluster.doors.fleet.members[0].address, keys)
            known = [await worker.engine.cached_blocks(keys) for worker in (prefill, decode)]
            assert [predicted, await prefill.store.lookup(keys), *known] == [full] * 4
            assert [each.usage.cached.total // BLOCK for each in found] == [0, predicted]
            seen.add(keys)
        assert len(seen) == 3
