"""The directory over a real Redis: nodes see what others hold, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.kvstore.directory.names import Names
from tests.support.directories import FORMAT, NAMES, QUICK, node, peer, process_of, settled, told, up
from tests.support.redis import RedisServer, redis_server
from tests.support.stores import eventually, key, keys

STEADY = replace(QUICK, directory_ttl_seconds=5.0, redis_lookup_seconds=5.0, redis_write_seconds=5.0)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        server.start()
        yield server


@pytest.fixture
def server(running: RedisServer) -> RedisServer:
    running.admin.flushall()
    return running


async def test_two_nodes_see_each_others_keys(server: RedisServer) -> None:
    async with node(server.url, "a") as a, node(server.url, "b") as b:
        a.add(keys(1, 2, 3))
        b.add(keys(1, 2))
        await settled(server, a, "a", keys(1, 2, 3))
        await settled(server, b, "b", keys(1, 2))
        await eventually(lambda: a.peers == (peer("b"),) and b.peers == (peer("a"),))
        assert [(found.peer, found.blocks) for found in await a.lookup(keys(1, 2, 3))] == [(peer("b"), 2)]
        assert [(found.peer, found.blocks) for found in await b.lookup(keys(1, 2, 3))] == [(peer("a"), 3)]
        a.remove(keys(2))
        await settled(server, a, "a", keys(1, 3))
        assert [found.blocks for found in await b.lookup(keys(1, 2, 3))] == [1]
        a.remove(keys(1))
        await settled(server, a, "a", keys(3))
        assert await b.lookup(keys(1, 2, 3)) == ()


@pytest.mark.parametrize("hole", [0, 1, 255, 256, 257, 700, 8_191, 8_192, 9_999, 10_000])
async def test_a_lookup_counts_leading_keys_up_to_the_first_hole_the_longest_run_first(
    server: RedisServer, hole: int
) -> None:
    prompt = keys(*range(10_000))
    async with (
        node(server.url, "a", told=STEADY) as a,
        node(server.url, "b", told=STEADY) as b,
        node(server.url, "c", told=replace(STEADY, directory_ttl_seconds=0.3)) as c,
    ):
        a.add([*prompt[:hole], *prompt[hole + 1 :]])
        b.add(prompt[:5_000])
        await settled(server, a, "a", [*prompt[:hole], *prompt[hole + 1 :]])
        await settled(server, b, "b", prompt[:5_000])
        await eventually(lambda: len(c.peers) == 2)
        runs = {found.peer.incarnation: found.blocks for found in await c.lookup(prompt)}
        assert runs == ({"a": hole, "b": 5_000} if hole else {"b": 5_000})
        assert list(runs.values()) == sorted(runs.values(), reverse=True)


async def test_a_node_that_leaves_takes_everything_back(server: RedisServer) -> None:
    async with node(server.url, "a", told=STEADY) as a:
        a.add(keys(1, 2, 3))
        await settled(server, a, "a", keys(1, 2, 3))
    assert server.admin.keys("*") == []


async def test_a_killed_node_vanishes_whole_within_its_time_to_live(server: RedisServer) -> None:
    async with node(server.url, "b") as b:
        async with process_of(server.url, "a", 1.0, [1, 2]) as process:
            await eventually(lambda: b.peers == (peer("a"),))
            assert [found.blocks for found in await b.lookup(keys(1, 2))] == [2]
            process.kill()
            await process.wait()
        ends = {server.admin.pexpiretime(name) for name in (NAMES.node("a"), NAMES.blocks("a"))}
        assert len(ends - {-2}) <= 1  # at one moment, unless that has passed
        assert all(server.admin.pttl(name) <= 1_000 for name in (NAMES.node("a"), NAMES.blocks("a")))
        await eventually(lambda: b.peers == () and not server.admin.exists(NAMES.node("a"), NAMES.blocks("a")))
        assert await b.lookup(keys(1, 2)) == ()
        await eventually(lambda: server.admin.smembers(NAMES.nodes) == {b"b"})


async def test_a_restarted_node_is_a_new_one_and_answers_for_none_of_the_old_ones_keys(server: RedisServer) -> None:
    async with node(server.url, "b") as b:
        async with process_of(server.url, "old", 30.0, [1, 2]) as process:
            process.kill()
        async with process_of(server.url, "new", 30.0, [1]):
            await eventually(lambda: len(b.peers) == 2)
            found = await b.lookup(keys(1, 2))
            assert [(each.peer.incarnation, each.blocks) for each in found] == [("old", 2), ("new", 1)]
            server.admin.unlink(NAMES.node("old"), NAMES.blocks("old"))  # its time comes
            await eventually(lambda: b.peers == (peer("new"),))
            assert [found.blocks for found in await b.lookup(keys(1, 2))] == [1]


async def test_nodes_of_two_formats_never_meet(server: RedisServer) -> None:
    other = bytes(reversed(FORMAT))
    async with node(server.url, "a") as a, node(server.url, "b", format_digest=other) as b, node(server.url, "c") as c:
        for directory in (a, b, c):
            directory.add(keys(1, 2))
        await eventually(lambda: len(told(server, "b", Names("twostroke", other))) == 2)
        await eventually(lambda: a.peers == (peer("c"),) and c.peers == (peer("a"),))
        assert [found.peer for found in await a.lookup(keys(1, 2))] == [peer("c")]
        assert b.peers == ()
        assert await b.lookup(keys(1, 2)) == ()


async def test_what_others_keep_in_the_same_redis_is_never_touched(server: RedisServer) -> None:
    server.admin.set("node", "1")
    server.admin.sadd("twostroke:nodes", "a", "b")
    server.admin.rpush("twostrokes:list", "x")
    server.admin.set(Names("other", FORMAT).blocks("a"), "x", px=100_000)
    before = {name: server.admin.dump(name) for name in server.admin.keys("*")}
    async with node(server.url, "a", told=replace(QUICK, directory_backlog=4)) as a:
        await eventually(lambda: up(a))
        a.add(keys(*range(300)))
        a.remove(keys(*range(0, 300, 2)))
        await settled(server, a, "a", keys(*range(1, 300, 2)))
        assert a.stats().overflows
        assert set(server.admin.keys("*")) == {
            *before,
            *(name.encode() for name in (NAMES.nodes, NAMES.node("a"), NAMES.blocks("a"))),
        }
    assert {name: server.admin.dump(name) for name in server.admin.keys("*")} == before


async def test_every_key_ends_by_itself(server: RedisServer) -> None:
    async with node(server.url, "a", told=STEADY) as a:
        a.add(keys(*range(5_000)))
        await settled(server, a, "a", keys(*range(5_000)))
        names = server.admin.keys("*")
        assert len(names) == 3
        assert all(0 < server.admin.pttl(name) <= 5_000 for name in names)


async def test_keys_that_come_and_go_before_they_are_told_are_never_written(server: RedisServer) -> None:
    async with node(server.url, "a", told=STEADY) as a:
        await eventually(lambda: up(a))
        writes = a.stats().writes
        a.add(keys(*range(1_000)))
        a.remove(keys(*range(999)))
        assert a.stats().waiting == 1
        await settled(server, a, "a", keys(999))
        await eventually(lambda: a.stats().writes == writes + 1)


async def test_a_rewrite_never_hides_what_is_held(server: RedisServer) -> None:
    held = keys(*range(9_000))
    async with node(server.url, "a", told=replace(STEADY, directory_backlog=9_000)) as a:
        a.add(held)
        await settled(server, a, "a", held)
        rewrites = a.stats().rewrites
        a.add(keys(*range(9_000, 18_001)))  # one more than may wait

        def rewritten() -> bool:
            assert all(server.admin.smismember(NAMES.blocks("a"), held))
            return a.stats().rewrites > rewrites and not a.stats().waiting

        await eventually(rewritten)
        await settled(server, a, "a", keys(*range(18_001)))
        assert a.stats().overflows == 1


async def test_cards_and_names_that_nobody_understands_are_passed_over(server: RedisServer) -> None:
    server.admin.sadd(NAMES.nodes, "future", b"\xff\xfe", "x" * 5_000)
    server.admin.set(NAMES.node("future"), b"\x00")
    async with node(server.url, "a") as a, node(server.url, "b") as b:
        await eventually(lambda: a.peers == (peer("b"),) and b.peers == (peer("a"),))
        await eventually(lambda: server.admin.smembers(NAMES.nodes) == {b"a", b"b", b"future"})


async def test_a_unix_socket_and_a_password_will_do(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        server.start()
        server.admin.config_set("requirepass", "s3cret")  # the connection that says so stays
        for url in (f"unix://:s3cret@{server.socket}", server.url.replace("//", "//:s3cret@")):
            async with node(url, "a") as a:
                a.add([key(1)])
                await settled(server, a, "a", keys(1))
