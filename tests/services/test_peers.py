"""Choosing among the ways to a peer: the first that works, and a failing one is left alone for a while."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.peers import Source, block_ends, relayed, sourcing
from tests.support.stores import Clock, eventually
from twostroke.errors import NotFound, Unavailable
from twostroke.kv import messages
from twostroke.kv.refs import Offer
from twostroke.kv.transport.peer import Peers, PeerTransport
from twostroke.kv.transport.peer_streams import StreamPeer
from twostroke.kv.transport.tcp import TcpLimits, TcpTransport

DEAD = Offer("tcp", b"127.0.0.1:1")


class Ways:
    """Peers, and what they opened."""

    def __init__(self, **told: float) -> None:
        self.clock = Clock()
        self.opened: list[Offer] = []
        self.peers = Peers({"tcp": self._tcp, "grpc": self._grpc}, pause_seconds=5.0, clock=self.clock, **told)  # type: ignore[arg-type]

    def _tcp(self, offer: Offer) -> PeerTransport:
        self.opened.append(offer)
        return TcpTransport(offer, TcpLimits(block_seconds=1.0))

    def _grpc(self, offer: Offer) -> PeerTransport:
        self.opened.append(offer)
        return StreamPeer(offer)

    async def read(self, source: Source, *offers: Offer, blocks: int = 3) -> None:
        """Read new blocks, which must come whole."""
        grant, places = source.holding(*range(1, blocks + 1))
        into = source.memory(blocks)
        pulled = await self.peers.read(offers, grant, places, into, None)
        assert (len(pulled.blocks), pulled.error) == (blocks, None)
        assert list(map(bytes, into)) == source.content(blocks)


@asynccontextmanager
async def ways(**told: float) -> AsyncIterator[Ways]:
    made = Ways(**told)
    try:
        yield made
    finally:
        await made.peers.close()


async def test_the_first_offer_that_works_is_taken_and_kept_open(tmp_path: Path) -> None:
    async with sourcing(tmp_path) as source, ways() as made:
        for _ in range(3):
            await made.read(source, Offer("unheard-of", b""), source.plane.offer, source.streams)
        assert made.opened == [source.plane.offer]
        assert source.plane.connections == 1


async def test_a_failing_offer_is_left_alone_for_a_while_and_then_tried_again(tmp_path: Path) -> None:
    async with sourcing(tmp_path) as source, ways() as made:
        offers = (DEAD, source.streams)
        assert made.peers.pick(offers) == offers
        await made.read(source, *offers)
        assert made.peers.pick(offers) == (source.streams,)
        await made.read(source, *offers)
        made.clock.now += 4.9
        assert made.peers.pick(offers) == (source.streams,)
        made.clock.now += 0.1
        assert made.peers.pick(offers) == offers


async def test_where_one_way_breaks_the_next_goes_on_behind_the_blocks_that_came(tmp_path: Path) -> None:
    async with sourcing(tmp_path) as source, ways() as made:
        with relayed(source.plane.offer, hold_at=block_ends(source.block_bytes, 0) + 9) as relay:
            await made.read(source, relay.offer, source.streams)
            assert made.opened == [relay.offer, source.streams]
            assert relay.held.is_set()


async def test_without_any_way_a_read_is_unavailable_at_once(tmp_path: Path) -> None:
    async with sourcing(tmp_path) as source, ways() as made:
        grant, blocks = source.holding(1)
        for opened in (1, 1):
            pulled = await made.peers.read([DEAD], grant, blocks, source.memory(1), None)
            assert (pulled.blocks, type(pulled.error)) == ((), Unavailable)
            assert len(made.opened) == opened


async def test_what_the_node_itself_refuses_is_not_asked_for_another_way(tmp_path: Path) -> None:
    async with sourcing(tmp_path) as source, ways() as made:
        grant, blocks = source.holding(1)
        source.store.blocks.release([grant.lease.id])
        offers = (source.plane.offer, source.streams)
        pulled = await made.peers.read(offers, grant, blocks, source.memory(1), None)
        assert (pulled.blocks, type(pulled.error)) == ((), NotFound)
        assert made.peers.pick(offers) == offers
        assert made.opened == [source.plane.offer]


async def test_an_offer_that_cannot_be_taken_here_is_passed_over(tmp_path: Path) -> None:
    def missing(offer: Offer) -> PeerTransport:
        raise Unavailable("the package is not installed")

    async with sourcing(tmp_path) as source:
        peers = Peers({"nixl": missing, "grpc": StreamPeer})
        offers = [Offer("nixl", b"agent"), source.streams]
        pulled = await peers.read(offers, *source.holding(1), source.memory(1), None)
        assert (len(pulled.blocks), pulled.error) == (1, None)
        await peers.close()


async def test_no_more_transports_are_kept_open_than_allowed(tmp_path: Path) -> None:
    async with sourcing(tmp_path) as source, ways(most=1) as made:
        await made.read(source, source.plane.offer)
        assert source.plane.connections == 1
        await made.read(source, source.streams)
        await eventually(lambda: source.plane.connections == 0)
        await made.read(source, source.plane.offer)
        assert made.opened == [source.plane.offer, source.streams, source.plane.offer]


def test_offers_travel_as_messages() -> None:
    offers = (DEAD, Offer("grpc", b"node-1:7001"), Offer("nixl", bytes(range(256))))
    assert messages.offers(messages.offers_pb(offers)) == offers


@pytest.mark.parametrize("blocks", [1, 16])
async def test_both_ways_bring_the_same_bytes(tmp_path: Path, blocks: int) -> None:
    async with sourcing(tmp_path) as source, ways() as made:
        await made.read(source, source.plane.offer, blocks=blocks)
        await made.read(source, source.streams, blocks=blocks)
