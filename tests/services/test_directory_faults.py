"""Redis absent, killed, emptied, stopped, silent or refusing: nobody waits or fails, and afterwards all is right."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from services.kvstore.directory.directory import MAX_LOOKUPS, Directory
from tests.support.directories import NAMES, QUICK, Proxy, down, node, peer, settled, told, up
from tests.support.redis import RedisServer, redis_server
from tests.support.stores import eventually, keys

SOME = keys(1, 2, 3)


@pytest.fixture
def absent(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


@pytest.fixture
def server(absent: RedisServer) -> RedisServer:
    absent.start()
    return absent


@asynccontextmanager
async def two_nodes(server: RedisServer, url: str = "") -> AsyncIterator[tuple[Directory, Directory]]:
    """Nodes `a`, which holds SOME, and `b`, which knows of `a`; `b` reaches Redis by the url."""
    async with node(server.url, "a") as a, node(url or server.url, "b") as b:
        a.add(SOME)
        await settled(server, a, "a", SOME)
        await eventually(lambda: b.peers == (peer("a"),))
        yield a, b


async def given_up(directory: Directory) -> None:
    """Ask until Redis is given up; each question gets the answer that nothing is known."""
    while not down(directory):
        assert await directory.lookup(SOME) == ()
        await asyncio.sleep(0)  # some answers need no wait
    unasked = directory.stats().unasked
    assert await directory.lookup(SOME) == ()
    assert directory.stats().unasked == unasked + 1


async def found_again(server: RedisServer, a: Directory, b: Directory) -> None:
    """Return when `b` finds in Redis what `a` holds, as before."""
    await settled(server, a, "a", SOME)
    await eventually(lambda: up(b) and b.peers == (peer("a"),))
    assert [found.blocks for found in await b.lookup(SOME)] == [3]


async def test_a_redis_that_is_absent_at_first_is_found_when_it_comes(
    absent: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with node(absent.url, "a") as a:
        a.add(keys(1, 2, 3, 4))
        assert await a.lookup(SOME) == ()
        await eventually(lambda: down(a) and a.stats().failures > 5)
        a.remove(keys(4))
        absent.start()
        await settled(absent, a, "a", SOME)
        assert a.stats().rewrites == 1
    said = [record.message for record in caplog.records]
    assert said == ["the directory is away; this node serves alone", "the directory is there"]


async def test_a_node_that_never_found_its_redis_leaves_without_it(absent: RedisServer) -> None:
    async with node(absent.url, "a") as a:
        a.add(SOME)
        await eventually(lambda: down(a))


async def test_a_killed_redis_comes_back_empty_and_is_told_everything(server: RedisServer) -> None:
    async with two_nodes(server) as (a, b):
        server.kill()
        await given_up(b)
        a.add(keys(4, 5))
        a.remove(keys(4, 5))
        server.start()
        await found_again(server, a, b)


async def test_a_redis_that_comes_back_with_what_it_once_knew_is_set_right(server: RedisServer) -> None:
    async with two_nodes(server) as (a, b):
        a.add(keys(4))
        await settled(server, a, "a", [*SOME, *keys(4)])
        server.save()
        a.remove(keys(4))
        await settled(server, a, "a", SOME)
        server.kill()
        server.start()
        await found_again(server, a, b)


async def test_a_redis_that_was_emptied_is_told_everything(server: RedisServer) -> None:
    async with two_nodes(server) as (a, b):
        server.admin.flushall()
        await found_again(server, a, b)
        assert a.stats().rewrites > 1


async def test_a_set_that_was_evicted_alone_is_noticed_by_the_next_write(server: RedisServer) -> None:
    async with two_nodes(server) as (a, b):
        server.admin.unlink(NAMES.blocks("a"))
        a.add(keys(4))
        await settled(server, a, "a", [*SOME, *keys(4)])
        a.remove(keys(4))
        await found_again(server, a, b)


async def test_a_stopped_redis_is_given_up_and_taken_back(server: RedisServer) -> None:
    async with two_nodes(server) as (a, b):
        server.freeze()
        await given_up(b)
        a.add(keys(4, 5))
        await eventually(lambda: down(a))
        a.remove(keys(5))
        server.thaw()
        await settled(server, a, "a", [*SOME, *keys(4)])
        a.remove(keys(4))
        await found_again(server, a, b)


async def test_connections_that_break_are_made_anew(server: RedisServer) -> None:
    async with two_nodes(server) as (a, b):
        for name in range(4, 12):
            server.disconnect_all()
            a.add(keys(name))
            await b.lookup(SOME)
        a.remove(keys(*range(4, 12)))
        await found_again(server, a, b)


async def test_a_redis_that_takes_everything_and_answers_nothing_holds_nobody_and_no_connections(
    server: RedisServer,
) -> None:
    async with Proxy.to(server) as way, two_nodes(server, way.url) as (a, b):
        way.swallows = True
        answers = await asyncio.gather(*(b.lookup(SOME) for _ in range(200)))
        assert set(answers) == {()}
        await given_up(b)
        assert way.most_open <= MAX_LOOKUPS + 1
        await eventually(lambda: way.open <= 1)  # the probe's
        way.swallows = False
        await found_again(server, a, b)


async def test_a_black_hole_from_the_start_delays_nothing_but_entries() -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(swallow, "127.0.0.1", 0) as hole:
        url = f"redis://127.0.0.1:{hole.sockets[0].getsockname()[1]}"
        async with node(url, "a", told=replace(QUICK, redis_lookup_seconds=0.02)) as a:
            a.add(SOME)
            await eventually(lambda: down(a) and a.stats().failures > 5)
            assert await a.lookup(SOME) == ()


@pytest.mark.parametrize(
    "answer", [b"+OK\r\n", b":1\r\n", b"*-1\r\n", b"*1\r\n:7\r\n", b"HTTP/1.1 400 Bad\r\n\r\n", b"*x\r\n"]
)
async def test_a_server_that_is_no_redis_is_away(answer: bytes) -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            writer.write(answer)
        writer.close()

    listening = await asyncio.start_server(other, "127.0.0.1", 0)
    async with listening, node(f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}", "a") as a:
        await eventually(lambda: down(a) and a.stats().failures > 2)


def read_only(server: RedisServer) -> Callable[[], object]:
    server.admin.config_set("replica-serve-stale-data", "yes")
    server.admin.replicaof("127.0.0.1", 1)
    return lambda: server.admin.replicaof("NO", "ONE")


def out_of_memory(server: RedisServer) -> Callable[[], object]:
    server.admin.config_set("maxmemory", 1)
    return lambda: server.admin.config_set("maxmemory", 0)


def asking_for_a_password(server: RedisServer) -> Callable[[], object]:
    server.admin.config_set("requirepass", "s3cret")
    server.disconnect_all()
    return lambda: server.admin.config_set("requirepass", "")


def of_the_wrong_type(server: RedisServer) -> Callable[[], object]:
    server.admin.set(NAMES.nodes, "no set")
    return lambda: server.admin.unlink(NAMES.nodes)


@pytest.mark.parametrize("refusing", [read_only, out_of_memory, asking_for_a_password, of_the_wrong_type])
async def test_a_redis_that_refuses_is_given_up_until_it_takes_writes_again(
    server: RedisServer, refusing: Callable[[RedisServer], Callable[[], object]], caplog: pytest.LogCaptureFixture
) -> None:
    async with two_nodes(server) as (a, b):
        relent = refusing(server)
        a.add(keys(4))
        await eventually(lambda: down(a) and down(b))
        assert await b.lookup(SOME) == ()
        a.remove(keys(4))
        relent()
        await found_again(server, a, b)
    assert "s3cret" not in caplog.text


async def test_a_redis_that_is_loading_is_waited_for(server: RedisServer) -> None:
    async with two_nodes(server) as (a, b):
        for name in range(200):
            server.admin.set(f"other:{name}", "x" * 100)
        server.save()
        server.kill()
        server.start("--key-load-delay", "5000", "--loading-process-events-interval-bytes", "1024", answering=False)
        await given_up(b)
        await found_again(server, a, b)


async def test_a_set_that_became_something_else_is_written_anew(server: RedisServer) -> None:
    async with two_nodes(server) as (a, b):
        server.admin.set(NAMES.blocks("a"), "no set")
        assert await b.lookup(SOME) == ()
        await found_again(server, a, b)


async def test_a_write_that_was_given_up_and_arrives_late_changes_nothing(server: RedisServer) -> None:
    async with Proxy.to(server) as way, node(way.url, "a", told=replace(QUICK, directory_ttl_seconds=30.0)) as a:
        a.add(SOME)
        await settled(server, a, "a", SOME)
        late = way.hold()
        a.add(keys(4))  # written and held up
        await eventually(lambda: down(a))
        a.remove(keys(4))
        await settled(server, a, "a", SOME)
        before = server.admin.info("commandstats")["cmdstat_eval"]["calls"]
        late.set()
        await eventually(lambda: server.admin.info("commandstats")["cmdstat_eval"]["calls"] > before)
        assert told(server, "a") == set(SOME)


async def test_lookups_that_are_cancelled_leave_no_answers_to_others(server: RedisServer) -> None:
    async with two_nodes(server) as (_, b):
        for turns in range(60):
            doomed = [asyncio.create_task(b.lookup(keys(1, 9))) for _ in range(4)]
            for _ in range(turns % 12):
                await asyncio.sleep(0)
            for task in doomed:
                task.cancel()
            found = await asyncio.gather(*(b.lookup(SOME[:count]) for count in (1, 2, 3)))
            assert [each[0].blocks for each in found] == [1, 2, 3]
            await asyncio.wait(doomed)


async def test_a_wrong_password_is_never_logged(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    server.admin.config_set("requirepass", "s3cret")
    async with node(server.url.replace("//", "//user:wr0ng@"), "a") as a:
        await eventually(lambda: down(a))
    assert "the directory is away" in caplog.text
    assert "wr0ng" not in caplog.text + "".join(str(vars(record)) for record in caplog.records)
