"""The store's own ways to move blocks."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench.store.ground import BLOCK_BYTES, BLOCKS, KV_FORMAT, Ground, NotMoved, require
from twostroke.kv import messages, proof
from twostroke.kv.blocks import BlockStoreClient, TransportChoice
from twostroke.kv.refs import BlockSlot, Lease
from twostroke.kv.tiers.disk import DiskLimits, DiskTier
from twostroke.kv.transport.pages import HostPages
from twostroke.kv.transport.peer import Grant, PeerTransport
from twostroke.v1 import kvstore_pb2 as pb
from twostroke.wire import duration_pb

TOKENS = KV_FORMAT.block_tokens
LEASE_SECONDS = 3_600.0  # of what peers read: longer than a run
CALL_SECONDS = 30.0
DISK_BYTES = 3 * BLOCKS * (BLOCK_BYTES + 4_096)


class Client:
    """A worker's client of a node: puts pages under new keys, and gets what a page was put under last."""

    def __init__(self, client: BlockStoreClient) -> None:
        self.store = client
        self.keys = [b""] * BLOCKS

    @classmethod
    @asynccontextmanager
    async def opened(cls, address: str, ground: Ground, transport: TransportChoice) -> AsyncIterator[Client]:
        """Use the node at `address`, which serves, inside the block."""
        pages = HostPages(ground.rows)
        async with BlockStoreClient.opened(
            address, KV_FORMAT, pages, transport=transport, lease_seconds=LEASE_SECONDS
        ) as client:
            yield cls(client)

    async def put(self, span: range) -> float:
        """Write pages as new blocks."""
        keys = [secrets.token_bytes(16) for _ in span]
        began = time.perf_counter()
        stored = await self.store.write_blocks(None, [(key, TOKENS) for key in keys], span)
        seconds = time.perf_counter() - began
        require(len(stored.refs), span, "put")
        self.keys[span.start : span.stop] = keys
        await self._release(stored.lease)
        return seconds

    async def get(self, span: range) -> float:
        """Read held blocks."""
        keys, pages = self.keys[span.start : span.stop], range(BLOCKS + span.start, BLOCKS + span.stop)
        began = time.perf_counter()
        loaded = await self.store.read_blocks(None, keys, pages)
        seconds = time.perf_counter() - began
        require(loaded.blocks, span, "get")
        await self._release(loaded.lease)
        return seconds

    async def granted(self, secret: bytes) -> tuple[Grant, tuple[BlockSlot, ...]]:
        """A lease on all that was put last, as a node of another host gets it, and where the blocks lie."""
        node, named = await self.store.attached(), Lease.named(LEASE_SECONDS)
        request = pb.AcquireRequest(
            incarnation=node.incarnation,
            keys=self.keys,
            lease_id=named.id,
            opens=True,
            lease_duration=duration_pb(LEASE_SECONDS),
        )
        answer = await self.store.stub.Acquire(request, timeout=CALL_SECONDS)
        lease = messages.granted(named, answer.lease_duration, node)
        key = proof.node_key(node.incarnation, secret)
        signed = proof.sign(key, incarnation=node.incarnation, lease_id=lease.id, namespace="bench")
        return Grant(lease, "bench", signed), messages.block_slots(answer.blocks)

    async def _release(self, lease: Lease | None) -> None:
        if lease is not None:
            self.store.release(lease)
            await self.store.released()


class Disk:
    """The disk tier alone: what the kernel has not written yet lies in its page cache, and is read from there.

    Puts and gets go to a tier each: a second chance for whatever was read would let puts push out what is new.
    """

    def __init__(self, folder: Path, ground: Ground) -> None:
        limits = DiskLimits(bytes=DISK_BYTES, total_bytes=2 * DISK_BYTES, retry_seconds=LEASE_SECONDS)
        self._puts, self._gets = (DiskTier(folder / name, KV_FORMAT, limits) for name in ("puts", "gets"))
        self._ground = ground
        self._keys = [secrets.token_bytes(16) for _ in range(BLOCKS)]

    def open(self) -> None:
        """Write what gets read."""
        for tier in (self._puts, self._gets):
            tier.open()
        self._write(self._gets, range(BLOCKS), self._keys)

    def close(self) -> None:
        """Close both."""
        for tier in (self._puts, self._gets):
            tier.close()

    async def put(self, span: range) -> float:
        """Write pages as new blocks."""
        keys = [secrets.token_bytes(16) for _ in span]
        began = time.perf_counter()
        self._write(self._puts, span, keys)
        return time.perf_counter() - began

    async def get(self, span: range) -> float:
        """Read held blocks."""
        began = time.perf_counter()
        for page in span:
            if self._gets.read(self._keys[page], self._ground.target[page].data) is None:
                raise NotMoved("the disk has lost a block")
        return time.perf_counter() - began

    def _write(self, tier: DiskTier, span: range, keys: list[bytes]) -> None:
        for page, key in zip(span, keys, strict=True):
            if not tier.write(key, TOKENS, self._ground.source[page].data, lambda _: True):
                raise NotMoved("the disk takes no block")


class Peer:
    """Reads another node's blocks over one transport."""

    def __init__(self, transport: PeerTransport, grant: Grant, places: tuple[BlockSlot, ...], ground: Ground) -> None:
        self._transport, self._grant, self._places = transport, grant, places
        self._into = [row.data for row in ground.target]

    async def get(self, span: range) -> float:
        """Read leased blocks."""
        began = time.perf_counter()
        places, into = self._places[span.start : span.stop], self._into[span.start : span.stop]
        pulled = await self._transport.read(self._grant, places, into, None)
        seconds = time.perf_counter() - began
        if pulled.error is not None:
            raise pulled.error
        require(len(pulled.blocks), span, "peer")
        return seconds
