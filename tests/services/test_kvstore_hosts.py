"""Nodes of several hosts: what one has, another brings into its own arena, byte by byte."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.kvstore.assembly import introduce
from services.kvstore.settings import DiskSettings
from tests.support.directories import settled, told
from tests.support.neighbors import Host, held, host, read, released, written
from tests.support.redis import RedisServer, redis_server
from tests.support.stores import KV_FORMAT, eventually, key, keys, worker
from tests.support.stores import pages as rows_of
from twostroke.errors import Unavailable
from twostroke.kv.refs import Offer, Terms
from twostroke.v1 import kvstore_pb2 as pb

NAMES = (1, 2, 3, 4, 5)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        server.start()
        yield server


async def acquainted(*hosts: Host) -> None:
    """Return when each knows all others by the directory."""
    await eventually(lambda: all(len(each.directory_of_all.peers) == len(hosts) - 1 for each in hosts))


@pytest.mark.parametrize("checksums", [False, True])
async def test_blocks_of_a_ticket_come_from_the_node_of_its_lease(tmp_path: Path, checksums: bool) -> None:
    async with host(tmp_path, "a", checksums=checksums) as a, host(tmp_path, "b", checksums=checksums) as b:
        stored = await written(a, *NAMES)
        assert await read(b, *NAMES, source=stored.lease) == 5
        assert dict(b.peers.fetched_over) == {"tcp": 5}
        assert (b.peers.fetched, b.peers.fetched_bytes) == (5, 5 * KV_FORMAT.block_bytes)
        assert a.peers.granted == 5
        assert a.leases == 1, "the ticket's lease belongs to who has the ticket"


async def test_what_was_fetched_is_the_nodes_own_from_then_on(tmp_path: Path) -> None:
    async with host(tmp_path, "b") as b:
        async with host(tmp_path, "a") as a:
            stored = await written(a, *NAMES)
            assert await read(b, *NAMES, source=stored.lease) == 5
        assert await read(b, *NAMES) == 5
        assert b.idle


async def test_where_the_lease_has_ended_the_node_leases_for_itself_and_lets_go_again(tmp_path: Path) -> None:
    async with host(tmp_path, "a") as a, host(tmp_path, "b") as b:
        stored = await written(a, *NAMES)
        await released(a, stored.lease)
        assert await read(b, *NAMES, source=stored.lease) == 5
        await eventually(lambda: a.idle and b.idle)


async def test_without_a_ticket_the_directory_says_who_has_blocks(tmp_path: Path, redis: RedisServer) -> None:
    told_url = {"redis_url": redis.url}
    async with host(tmp_path, "a", **told_url) as a, host(tmp_path, "b", **told_url) as b:
        await acquainted(a, b)
        await released(a, (await written(a, *NAMES)).lease)
        await settled(redis, a.directory_of_all, a.node.incarnation, keys(*NAMES))
        assert await read(b, *NAMES, 6) == 5
        await eventually(lambda: a.idle and b.idle)
        await settled(redis, b.directory_of_all, b.node.incarnation, keys(*NAMES))


async def test_the_node_that_holds_most_is_asked(tmp_path: Path, redis: RedisServer) -> None:
    told_url = {"redis_url": redis.url}
    async with (
        host(tmp_path, "a", **told_url) as a,
        host(tmp_path, "b", **told_url) as b,
        host(tmp_path, "c", **told_url) as c,
    ):
        await acquainted(a, b, c)
        await written(a, 1, 2)
        await written(b, *NAMES)
        for each, names in ((a, (1, 2)), (b, NAMES)):
            await settled(redis, each.directory_of_all, each.node.incarnation, keys(*names))
        assert await read(c, *NAMES) == 5
        assert (a.peers.granted, b.peers.granted) == (0, 5)


async def test_a_lookup_counts_what_others_hold_only_if_told_to(tmp_path: Path, redis: RedisServer) -> None:
    told_url = {"redis_url": redis.url}
    async with host(tmp_path, "a", **told_url) as a, host(tmp_path, "b", **told_url) as b:
        await acquainted(a, b)
        await written(a, *NAMES)
        await written(b, 1, 2)
        await settled(redis, a.directory_of_all, a.node.incarnation, keys(*NAMES))
        async with worker(b, rows_of(1)) as client:
            node = await client.attached()
            for anywhere, count in ((False, 2), (True, 5)):
                request = pb.LookupRequest(incarnation=node.incarnation, keys=keys(*NAMES, 6), anywhere=anywhere)
                assert (await client.stub.Lookup(request, timeout=5)).held == count


async def test_what_is_evicted_is_taken_out_of_the_directory(tmp_path: Path, redis: RedisServer) -> None:
    async with host(tmp_path, "a", slots=16, redis_url=redis.url) as a:
        await released(a, (await written(a, *range(16))).lease)
        await settled(redis, a.directory_of_all, a.node.incarnation, keys(*range(16)))
        await released(a, (await written(a, *range(100, 104))).lease)
        assert a.stats.evictions == 4
        left = [key(name) for name in [*range(16), *range(100, 104)] if held(a, [name])]
        assert len(left) == 16
        await settled(redis, a.directory_of_all, a.node.incarnation, left)


async def test_transient_blocks_are_read_under_their_lease_only_and_stay_transient(
    tmp_path: Path, redis: RedisServer
) -> None:
    told_url = {"redis_url": redis.url}
    async with host(tmp_path, "a", **told_url) as a, host(tmp_path, "b", **told_url) as b:
        await acquainted(a, b)
        await written(a, 1, 2)
        hidden = await written(a, *NAMES, terms=Terms(transient=True))
        assert len(hidden.refs) == 5
        await settled(redis, a.directory_of_all, a.node.incarnation, keys(1, 2))
        assert await read(b, *NAMES) == 2
        assert await read(b, *NAMES, source=hidden.lease) == 5
        assert await read(b, *NAMES) == 2
        await eventually(lambda: b.idle)
        assert (b.stats.committed, b.stats.transient) == (2, 0)
        assert told(redis, b.node.incarnation) <= set(keys(1, 2))


async def test_two_who_may_see_transient_blocks_at_once_both_get_them(tmp_path: Path) -> None:
    async with host(tmp_path, "a") as a, host(tmp_path, "b") as b:
        hidden = await written(a, *NAMES, terms=Terms(transient=True))
        assert await asyncio.gather(*(read(b, *NAMES, source=hidden.lease) for _ in range(3))) == [5, 5, 5]
        await eventually(lambda: b.idle)
        assert b.stats.committed == 0


async def test_blocks_are_fetched_once_for_all_who_ask_meanwhile(tmp_path: Path) -> None:
    async with host(tmp_path, "a") as a, host(tmp_path, "b") as b:
        stored = await written(a, *NAMES)
        reads = [read(b, *NAMES[:count], source=stored.lease) for count in (5, 5, 3, 5)]
        assert await asyncio.gather(*reads) == [5, 5, 3, 5]
        assert (b.peers.fetched, a.peers.granted) == (5, 5)


async def test_a_peer_brings_blocks_up_from_its_disk(tmp_path: Path) -> None:
    disk = DiskSettings(disk_directory=tmp_path / "disk", disk_bytes=4 << 20)
    async with host(tmp_path, "b") as b:
        async with host(tmp_path, "a", disk=disk) as a:
            await written(a, *NAMES)
        async with host(tmp_path, "a", disk=disk) as a:
            await eventually(lambda: a.blocks.reachable(keys(*NAMES)) == 5)
            assert held(a, NAMES) == 0
            lease = (await written(a, 9)).lease
            assert await read(b, *NAMES, source=lease) == 5


async def test_a_node_that_asks_another_is_not_passed_on(tmp_path: Path, redis: RedisServer) -> None:
    told_url = {"redis_url": redis.url}
    async with host(tmp_path, "a", **told_url) as a, host(tmp_path, "b", **told_url) as b, host(tmp_path, "c") as c:
        await acquainted(a, b)
        await written(a, *NAMES)
        await settled(redis, a.directory_of_all, a.node.incarnation, keys(*NAMES))
        lease = (await written(b, 9)).lease
        assert await read(c, *NAMES, source=lease) == 0
        assert (a.peers.granted, b.peers.fetched) == (0, 0)


async def test_another_node_never_decides_which_blocks_a_node_holds(tmp_path: Path) -> None:
    async with host(tmp_path, "a", formatted=False) as a:
        with pytest.raises(Unavailable):
            a.node.attach(KV_FORMAT, "", follows=True)
        assert a.node.format is None
        a.node.attach(KV_FORMAT, "")
        a.node.attach(KV_FORMAT, "", follows=True)


@pytest.mark.parametrize(
    ("address", "data", "offered"),
    [
        ("127.0.0.1:7000", "127.0.0.1:7010", "127.0.0.1:7010"),
        ("10.0.0.1:7000", "10.1.0.1:7010", "10.1.0.1:7010"),
        ("10.0.0.1:7000", "0.0.0.0:7010", "10.0.0.1:7010"),
        ("[fd00::1]:7000", "[::]:7010", "[fd00::1]:7010"),
        ("10.0.0.1:7000", "127.0.0.1:7010", None),
    ],
)
async def test_a_data_plane_is_offered_where_other_hosts_reach_it(
    tmp_path: Path, address: str, data: str, offered: str | None
) -> None:
    async with host(tmp_path, "a") as a:
        introduce(a.node, address, Offer("tcp", data.encode()))
        assert a.node.address == address
        expected = [Offer("tcp", offered.encode())] if offered else []
        assert a.node.offers == (*expected, Offer("grpc", address.encode()))
