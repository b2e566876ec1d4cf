"""A real Redis under any sequence of changes, losses and faults ends with exactly the keys that a node holds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.directories import NAMES, QUICK, node, settled, up
from tests.support.redis import RedisServer, redis_server
from tests.support.stores import eventually, keys

TOLD = replace(QUICK, directory_backlog=8, directory_ttl_seconds=0.3)  # a burst overflows, and entries may end

NUMBERS = st.lists(st.integers(0, 23), max_size=6)
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), NUMBERS),
        st.tuples(st.just("remove"), NUMBERS),
        st.sampled_from(
            [(word, []) for word in ("burst", "purge", "flush", "evict", "disconnect", "give way", "settle", "stop")]
        ),
    ),
    max_size=25,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        server.start()
        yield server


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(moves=MOVES)
def test_redis_ends_with_exactly_what_is_held(server: RedisServer, moves: list[tuple[str, list[int]]]) -> None:
    server.admin.flushall()
    asyncio.run(play(server, moves))


async def play(server: RedisServer, moves: list[tuple[str, list[int]]]) -> None:
    held: set[int] = set()
    frozen = False
    async with node(server.url, "a", told=TOLD) as directory:
        await eventually(lambda: up(directory))
        for move, names in moves:
            if frozen and move in ("flush", "evict", "disconnect", "settle"):
                server.thaw()
                frozen = False
            match move:
                case "add" | "burst":
                    come = names or list(range(24))
                    directory.add(keys(*come))
                    held.update(come)
                case "remove" | "purge":
                    go = names or list(range(24))
                    directory.remove(keys(*go))
                    held.difference_update(go)
                case "flush":
                    server.admin.flushall()
                case "evict":
                    server.admin.unlink(NAMES.blocks("a"))
                case "disconnect":
                    server.disconnect_all()
                case "give way":
                    await asyncio.sleep(0)
                case "settle":
                    await settled(server, directory, "a", keys(*held))
                case "stop":
                    server.freeze()
                    frozen = True
        if frozen:
            server.thaw()
        await settled(server, directory, "a", keys(*held))
        writes = directory.stats().writes
        await eventually(lambda: directory.stats().writes > writes)  # a heartbeat later nothing has changed
        await settled(server, directory, "a", keys(*held))
