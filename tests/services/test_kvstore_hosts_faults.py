"""Nodes of several hosts, and what may go wrong between them: every trouble is a miss, in time, with nothing left."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from pathlib import Path

import pytest

from services.kvstore.directory.breaker import State
from tests.support.neighbors import Host, held, host, read, reader, released, written
from tests.support.peers import block_ends, relayed
from tests.support.redis import redis_server
from tests.support.storecalls import refusal
from tests.support.stores import KV_FORMAT, eventually, keys, worker
from tests.support.stores import pages as rows_of
from twostroke import wire
from twostroke.errors import InvalidRequest
from twostroke.kv.proof import PROOF_BYTES
from twostroke.kv.refs import Lease, Offer
from twostroke.v1 import kvstore_pb2 as pb

NAMES = (1, 2, 3, 4, 5)
DEAD = Offer("tcp", b"127.0.0.1:1")
ALONE = "a peer is left alone"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said about peers in trouble."""
    return [record.__dict__["error"] for record in caplog.records if record.message == ALONE]


def offering(store: Host, *offers: Offer) -> None:
    """Change how others may read blocks."""
    store.node.offers = offers


async def test_blocks_that_the_peer_lost_are_a_miss(tmp_path: Path) -> None:
    async with host(tmp_path, "a", slots=16) as a, host(tmp_path, "b") as b:
        stored = await written(a, *NAMES)
        await released(a, stored.lease)
        await written(a, *range(100, 116))
        assert held(a, NAMES) == 0
        assert await read(b, *NAMES, source=stored.lease) == 0
        assert (b.peers.misses, b.peers.failures) == (1, 0)
        assert b.idle


async def test_blocks_of_an_earlier_life_of_the_peer_are_a_miss(tmp_path: Path) -> None:
    async with host(tmp_path, "b") as b:
        async with host(tmp_path, "a") as a:
            stored = await written(a, 1, 2)
            assert await read(b, 1, source=stored.lease) == 1
        async with host(tmp_path, "a", listen=a.address):
            await eventually(lambda: not b.gathering.fetching.neighbors.is_paused(a.address))
            assert await read(b, 1, 2, source=stored.lease) == 1
        assert b.idle


async def test_a_peer_that_is_gone_costs_one_try_and_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with host(tmp_path, "b") as b:
        async with host(tmp_path, "a") as a:
            stored = await written(a, *NAMES)
        for _ in range(3):
            assert await read(b, *NAMES, source=stored.lease) == 0
        assert b.peers.failures == len(lines(caplog)) == 1
        assert b.idle


async def test_a_silent_peer_costs_one_caller_a_bounded_try(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        source = dataclasses.replace(Lease.named(5.0), incarnation="f" * 16, address=address)
        async with host(tmp_path, "b", seconds=0.5) as b:
            for _ in range(3):
                assert await read(b, *NAMES, source=source) == 0
            assert b.peers.failures == len(lines(caplog)) == 1
            assert b.idle


async def test_a_peer_that_stops_in_the_middle_leaves_the_blocks_that_came(tmp_path: Path) -> None:
    async with host(tmp_path, "a") as a, host(tmp_path, "b", seconds=0.6) as b:
        stored = await written(a, *NAMES)
        with relayed(a.node.offers[0], hold_at=block_ends(KV_FORMAT.block_bytes, 1) + 9) as relay:
            offering(a, relay.offer)
            assert await read(b, *NAMES, source=stored.lease) == 2
            assert relay.held.is_set()
        assert b.peers.fetched == 2
        assert b.idle
        assert b.stats.free == b.stats.slots - 2


async def test_where_tcp_stops_in_the_middle_grpc_brings_the_rest(tmp_path: Path) -> None:
    async with host(tmp_path, "a") as a, host(tmp_path, "b") as b:
        stored = await written(a, *NAMES)
        with relayed(a.node.offers[0], hold_at=block_ends(KV_FORMAT.block_bytes, 1) + 9) as relay:
            offering(a, relay.offer, a.node.offers[1])
            assert await read(b, *NAMES, source=stored.lease) == 5
        assert dict(b.peers.fetched_over) == {"tcp": 2, "grpc": 3}


async def test_where_the_data_plane_cannot_be_reached_blocks_come_over_grpc(tmp_path: Path) -> None:
    async with host(tmp_path, "a") as a, host(tmp_path, "b") as b:
        stored = await written(a, *NAMES)
        offering(a, DEAD, a.node.offers[1])
        assert await read(b, *NAMES, source=stored.lease) == 5
        assert dict(b.peers.fetched_over) == {"tcp": 0, "grpc": 5}
        assert b.peers.failures == 0


async def test_a_damaged_block_is_a_miss(tmp_path: Path) -> None:
    async with host(tmp_path, "a") as a, host(tmp_path, "b") as b:
        stored = await written(a, *NAMES)
        with relayed(a.node.offers[0], flip_at=block_ends(KV_FORMAT.block_bytes, 2) - 99) as relay:
            offering(a, relay.offer)
            assert await read(b, *NAMES, source=stored.lease) == 2
        assert b.idle


async def test_a_wrong_proof_opens_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with host(tmp_path, "a") as a, host(tmp_path, "b") as b:
        stored = await written(a, *NAMES)
        a.node.key = bytes(PROOF_BYTES)
        assert await read(b, *NAMES, source=stored.lease) == 0
        assert lines(caplog) == ["the peer does not take the proof"]
        assert b.idle


async def test_a_peer_with_other_blocks_is_a_miss_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = dataclasses.replace(KV_FORMAT, model="another")
    async with host(tmp_path, "a", kv_format=other) as a, host(tmp_path, "b") as b:
        source = dataclasses.replace(Lease.named(5.0), incarnation=a.node.incarnation, address=a.address)
        for _ in range(3):
            assert await read(b, *NAMES, source=source) == 0
        (line,) = lines(caplog)
        assert "model differs" in line


async def test_while_redis_is_away_nodes_stand_alone_and_tickets_still_lead_from_one_to_the_other(
    tmp_path: Path,
) -> None:
    with redis_server(tmp_path) as redis:
        async with (
            host(tmp_path, "a", redis_url=redis.url) as a,
            host(tmp_path, "b", redis_url=redis.url) as b,
        ):
            stored = await written(a, *NAMES)
            await eventually(lambda: b.directory_of_all.stats().state is State.DOWN)
            assert await read(a, *NAMES) == 5
            assert await read(b, *NAMES) == 0
            assert await read(b, *NAMES, source=stored.lease) == 5


async def test_a_caller_is_answered_in_its_time_and_the_fetch_goes_on(tmp_path: Path) -> None:
    async with host(tmp_path, "a") as a, host(tmp_path, "b") as b:
        stored = await written(a, *NAMES)
        with relayed(a.node.offers[0], hold_at=block_ends(KV_FORMAT.block_bytes, 1) + 9) as relay:
            offering(a, relay.offer)
            async with worker(b, rows_of(1)) as client:
                request = pb.AcquireRequest(
                    incarnation=b.node.incarnation,
                    lease_id=Lease.named(5.0).id,
                    lease_duration=wire.duration_pb(5.0),
                    opens=True,
                    keys=keys(*NAMES),
                    source=wire.lease_pb(stored.lease),
                )
                response = await client.stub.Acquire(request, timeout=0.3)
            assert list(response.blocks) == []
            relay.go.set()
            await eventually(lambda: held(b, NAMES) == 5)


async def test_a_caller_that_leaves_takes_nothing_with_it(tmp_path: Path) -> None:
    async with host(tmp_path, "a") as a, host(tmp_path, "b") as b:
        stored = await written(a, *NAMES)
        with relayed(a.node.offers[0], hold_at=block_ends(KV_FORMAT.block_bytes, 1) + 9) as relay:
            offering(a, relay.offer)
            async with reader(b, 5) as (client, _):
                reading = asyncio.create_task(client.read_blocks(None, keys(*NAMES), [*range(5)], source=stored.lease))
                await asyncio.to_thread(relay.held.wait)
                assert b.stats.reserved == 5
                reading.cancel()
                relay.go.set()
                await asyncio.wait({reading})
            await eventually(lambda: b.idle and held(b, NAMES) == 5)


async def test_a_node_that_ends_breaks_off_what_it_reads(tmp_path: Path) -> None:
    async with host(tmp_path, "a") as a, host(tmp_path, "b") as b:
        stored = await written(a, *NAMES)
        with relayed(a.node.offers[0], hold_at=block_ends(KV_FORMAT.block_bytes, 1) + 9) as relay:
            offering(a, relay.offer)
            reading = asyncio.create_task(read(b, *NAMES, source=stored.lease))
            await asyncio.to_thread(relay.held.wait)
            await b.node.close()
            assert b.stats.reserved == 0
            assert await reading == 0


async def test_beyond_the_bound_on_fetches_a_caller_goes_without(tmp_path: Path) -> None:
    async with host(tmp_path, "a") as a, host(tmp_path, "b", fetches=1) as b:
        stored = await written(a, *NAMES)
        with relayed(a.node.offers[0], hold_at=block_ends(KV_FORMAT.block_bytes, 1) + 9) as relay:
            offering(a, relay.offer)
            first = asyncio.create_task(read(b, *NAMES, source=stored.lease))
            await asyncio.to_thread(relay.held.wait)
            assert await read(b, 9, source=stored.lease) == 0
            assert b.peers.refused == 1
            relay.go.set()
            assert await first == 5


@pytest.mark.parametrize("broken", [{"id": "short"}, {"address": ""}, {"incarnation": "i" * 400}])
async def test_a_source_that_names_no_lease_at_a_store_is_refused(tmp_path: Path, broken: dict[str, str]) -> None:
    async with host(tmp_path, "b") as b, worker(b, rows_of(1)) as client:
        named = dataclasses.replace(Lease.named(5.0), incarnation="f" * 16, address="127.0.0.1:1")
        request = pb.AcquireRequest(
            incarnation=b.node.incarnation,
            lease_id=Lease.named(5.0).id,
            lease_duration=wire.duration_pb(5.0),
            opens=True,
            keys=keys(1),
            source=wire.lease_pb(dataclasses.replace(named, **broken)),
        )
        await refusal(InvalidRequest, client.stub.Acquire(request, timeout=5))
        assert b.idle
