"""What callers advise about their stored prompts: kept ones outlast a flood, and nothing but the cache changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.decode.assembly import assembled as decode_service
from services.decode.settings import DecodeSettings
from services.kvstore.settings import DiskSettings
from services.prefill.assembly import assembled as prefill_service
from services.prefill.settings import PrefillSettings
from services.router.assembly import Doors
from services.router.assembly import assembled as router_service
from services.router.gateway.settings import GatewaySettings
from services.router.settings import RouterSettings
from tests.support.alone import Alone
from tests.support.apikeys import tenant, write_keys
from tests.support.cluster import SERVER, Cluster, Shape, started, tiny_model
from tests.support.stores import eventually
from twostroke.client import Client
from twostroke.errors import ContextTooLong, InvalidRequest, NotFound
from twostroke.telemetry import Telemetry
from twostroke.types import Advised, CachePolicy

PAGES, SLOTS = 24, 64
PROMPT = tuple(range(1, 101))  # six blocks of 16, and four tokens
HOW: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
FLOODS = 8  # prompts that together fill the arena more than twice, and the workers' pages


@asynccontextmanager
async def small(folder: Path, **shape: Any) -> AsyncIterator[Cluster]:
    """A cluster with SLOTS slots in its arena, a quarter of which may be kept, and PAGES pages a worker."""
    model = tiny_model(folder / "model")
    async with Alone.started(model) as alone:
        block = alone.engine.format.block_bytes
    shape |= {"arena_bytes": SLOTS * (block + 64) + (8 << 10), "kv_bytes": f"{PAGES * block // 1024}KiB"}
    async with started(Shape(model=model, **shape)) as cluster:
        yield cluster


async def flood(cluster: Cluster) -> None:
    for number in range(FLOODS):
        other = tuple((at + 31 * number) % 250 for at in range(16 * PAGES - 60))
        await cluster.client.complete(other, **HOW)
    await cluster.settled()


async def stored(cluster: Cluster) -> int:
    """Prompt tokens that came from the store when it was asked again."""
    return (await cluster.client.complete(PROMPT, **HOW)).usage.cached.store


async def test_a_prompt_that_is_kept_outlasts_a_flood_and_answers_alike(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        first = await cluster.client.complete(PROMPT, keep_for=60.0, **HOW)
        assert first.usage.kept_blocks == 6
        await flood(cluster)
        again = await cluster.client.complete(PROMPT, **HOW)
        assert (again.usage.cached.store, again.usage.kept_blocks) == (96, None)
        assert again.tokens == first.tokens
        assert cluster.node.stats().honoured_keeps == 6


async def test_a_prompt_that_is_not_kept_or_released_again_does_not_outlast_it(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        await cluster.client.complete(PROMPT, **HOW)
        await flood(cluster)
        assert await stored(cluster) == 0
        await cluster.settled()
        cache = cluster.client.cache
        kept = await cache.keep(PROMPT, 1e4)
        assert (kept.prompt_tokens, kept.prompt_blocks, kept.blocks, kept.keep_for) == (100, 6, 6, 600.0)
        assert (await cache.release(PROMPT)).blocks == 6
        assert cluster.node.stats().kept == 0
        await flood(cluster)
        assert await stored(cluster) == 0


async def test_what_an_answer_adds_is_kept_too_and_the_next_turn_finds_it(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        answer = await cluster.client.complete(PROMPT, keep_for=60.0, **{**HOW, "max_tokens": 40})
        assert answer.usage.kept_blocks == (100 + 40 - 1) // 16
        await flood(cluster)
        turn = (*PROMPT, *(token.id for token in answer.tokens), 7, 8, 9)
        assert (await cluster.client.complete(turn, **HOW)).usage.cached.store == 16 * answer.usage.kept_blocks


async def test_a_session_that_pauses_finds_all_its_turns_again_until_it_is_released(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        turn, kept = PROMPT, 0
        for number in range(5):
            answer = await cluster.client.complete(turn, keep_for=60.0, session="agent", **HOW)
            assert answer.usage.cached.store == 16 * kept
            kept = answer.usage.kept_blocks
            assert kept == (len(turn) + 11) // 16
            turn = (*turn, *(token.id for token in answer.tokens), *range(100 + number, 120 + number))
            await flood(cluster)
        assert (await cluster.client.cache.release(turn)).blocks == kept
        assert cluster.node.stats().kept == 0


async def test_each_choice_is_kept_and_shared_blocks_count_once(tmp_path: Path) -> None:
    async with started(Shape(model=tiny_model(tmp_path / "model"))) as cluster:
        how = {"max_tokens": 40, "temperature": 1.0, "seed": 3, "n": 2, "ignore_eos": True, "keep_for": 5.0}
        *_, usage = [event async for event in cluster.client.generate(PROMPT, **how)]
        assert usage.kept_blocks == 6 + 2 * 2
        assert cluster.node.stats().kept == 10


async def test_no_more_is_kept_than_a_namespace_may_have(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        kept = [(await cluster.client.complete((number, *PROMPT), keep_for=60.0, **HOW)).usage for number in range(3)]
        assert [usage.kept_blocks for usage in kept] == [7, 7, SLOTS // 4 - 14]


async def test_a_request_that_stores_nothing_keeps_what_is_stored(tmp_path: Path) -> None:
    async with started(Shape(model=tiny_model(tmp_path / "model"))) as cluster:
        policy: dict[str, Any] = {"cache_policy": CachePolicy.READ_ONLY, "keep_for": 5.0}
        assert (await cluster.client.complete(PROMPT, **HOW, **policy)).usage.kept_blocks == 0
        await cluster.client.complete(PROMPT, **HOW)
        assert (await cluster.client.complete(PROMPT, **HOW, **policy)).usage.kept_blocks == 6
        with pytest.raises(InvalidRequest) as refused:
            await cluster.client.complete(PROMPT, cache_policy=CachePolicy.BYPASS, keep_for=5.0)
        assert refused.value.field == "keep_for"


async def test_advice_reaches_no_other_namespace(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    keys = write_keys(path, tenant("a"), tenant("b"))
    async with started(Shape(model=tiny_model(tmp_path / "model"), api_keys=path)) as cluster:
        clients = [Client(cluster.doors.grpc, api_key=key) for key in keys]
        async with clients[0] as ours, clients[1] as theirs:
            await ours.complete(PROMPT, keep_for=60.0, cache_salt="s", **HOW)
            for advice in (theirs.cache.release, theirs.cache.prefetch):
                assert (await advice(PROMPT, cache_salt="s")).blocks == 0
            assert (await theirs.cache.keep(PROMPT, 5.0, cache_salt="s")).blocks == 0
            assert cluster.node.stats().kept == 6
            assert (await ours.cache.release(PROMPT)).blocks == 0  # without the salt it is another prompt
            assert (await ours.cache.release(PROMPT, cache_salt="s")).blocks == 6


async def test_a_prompt_on_disk_is_brought_into_memory(tmp_path: Path) -> None:
    disk = DiskSettings(disk_directory=tmp_path / "disk", disk_bytes=8 << 20)
    async with small(tmp_path, disk=disk) as cluster:
        await cluster.client.complete(PROMPT, **HOW)
        await cluster.settled()
        await eventually(lambda: cluster.node.disk_stats()[0].waiting == 0)
        await flood(cluster)
        assert (await cluster.client.cache.keep(PROMPT, 5.0)).blocks == 0  # out of memory
        assert (await cluster.client.cache.prefetch(PROMPT)).blocks == 6
        assert (await cluster.client.cache.keep(PROMPT, 5.0)).blocks == 6


@asynccontextmanager
async def without_store(model: Path) -> AsyncIterator[tuple[Doors, Client]]:
    """A router and workers that find nobody where they look for the store."""
    told: dict[str, Any] = {"model": model, "kvstore": "127.0.0.1:1", "weights_cache": "off", "server": SERVER}
    told |= {"kv_bytes": "16MiB", "tokens_per_step": 512, "max_running": 8}
    spans = Telemetry(None)
    async with (
        prefill_service(PrefillSettings(**told), spans) as (prefill, _),
        decode_service(DecodeSettings(**told), spans) as (decode, _),
    ):
        door = GatewaySettings(http_listen="127.0.0.1:0")
        settings = RouterSettings(prefill=(prefill.address,), decode=(decode.address,), gateway=door, server=SERVER)
        async with router_service(settings, spans) as doors, Client(doors.grpc) as client:
            async with asyncio.timeout(30):
                while doors.fleet.readiness is not None:
                    await doors.fleet.changed()
            yield doors, client


async def test_a_store_that_is_away_is_nobodys_error(tmp_path: Path) -> None:
    async with without_store(tiny_model(tmp_path / "model")) as (doors, client):
        cache = client.cache
        kept = await cache.keep(PROMPT, 5.0)
        assert kept == Advised(model=kept.model, prompt_tokens=100, prompt_blocks=6, blocks=0)
        assert [(await advice(PROMPT)).blocks for advice in (cache.release, cache.prefetch)] == [0, 0]
        answer = await client.complete(PROMPT, keep_for=5.0, **HOW)
        assert (len(answer.tokens), answer.usage.kept_blocks) == (12, 0)
        told = doors.dispatch.render_metrics().decode()
        assert 'twostroke_cache_advised_blocks_total{advice="keep"} 0.0' in told


async def test_a_prompt_that_cannot_be_asked_is_refused_by_name(tmp_path: Path) -> None:
    async with started(Shape(model=tiny_model(tmp_path / "model", max_positions=256))) as cluster:
        cache = cluster.client.cache
        with pytest.raises(ContextTooLong):
            await cache.prefetch("x" * 300)
        with pytest.raises(NotFound):
            await cache.release("x", model="another")
        for seconds in (0.0, -1.0, 86_401.0, float("nan")):
            with pytest.raises(InvalidRequest) as refused:
                await cache.keep("x", seconds)
            assert refused.value.field == "keep_for"


async def test_a_conversation_is_named_over_http_as_it_was_asked(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "How many legs has a spider, and how many a crab?"}]
    async with (
        started(Shape(model=tiny_model(tmp_path / "model"))) as cluster,
        aiohttp.ClientSession(cluster.http) as http,
    ):
        body = {"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "keep_for": 30}
        async with http.post("/v1/chat/completions", json=body) as response:
            usage = (await response.json())["usage"]
        kept = usage["prompt_tokens_details"]["kept_blocks"]
        assert kept == (usage["total_tokens"] - 1) // 16 > 2
        told = {}
        for advice, more in (("keep", {"keep_for": 1e4}), ("prefetch", {}), ("release", {})):
            async with http.post(f"/v1/cache/{advice}", json={"messages": messages, **more}) as response:
                assert response.status == 200
                told[advice] = await response.json()
        whole = usage["prompt_tokens"] // 16
        same = {"model": told["keep"]["model"], "prompt_tokens": usage["prompt_tokens"], "prompt_blocks": whole}
        assert told["keep"] == {"object": "cache.keep", **same, "blocks": whole, "keep_for": 600.0}
        assert told["prefetch"] == {"object": "cache.prefetch", **same, "blocks": whole}
        assert told["release"] == {"object": "cache.release", **same, "blocks": whole}
