"""Store nodes of several hosts in this process: each assembled as in production, with an arena folder of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.kvstore.assembly import assembled
from services.kvstore.directory.directory import Directory
from services.kvstore.gathering import Gathering
from services.kvstore.settings import DiskSettings, KvStoreSettings, PeerSettings, StoreSettings
from services.kvstore.status import status_pb
from tests.support.directories import QUICK
from tests.support.stores import KV_FORMAT, Store, keys, named, pages, worker
from twostroke.kv.blocks import BlockStoreClient, Stored
from twostroke.kv.format import KvFormat
from twostroke.kv.refs import ORDINARY, Lease, Terms
from twostroke.rpc.server import ServerSettings
from twostroke.v1 import kvstore_pb2 as pb


class Host(Store):
    """A node with its data plane."""

    @property
    def gathering(self) -> Gathering:
        gathering = self.node.others.gathering
        assert gathering is not None
        return gathering

    @property
    def directory_of_all(self) -> Directory:
        directory = self.node.others.directory
        assert directory is not None
        return directory

    @property
    def peers(self) -> pb.PeerStatus:
        """What it says of the others."""
        return status_pb(self.node).peers

    @property
    def leases(self) -> int:
        return self.stats.leases


@asynccontextmanager
async def host(
    folder: Path,
    name: str,
    *,
    listen: str = "127.0.0.1:0",
    slots: int = 16,
    redis_url: str = "",
    kv_format: KvFormat = KV_FORMAT,
    formatted: bool = True,
    disk: DiskSettings | None = None,
    checksums: bool = False,
    **told: object,
) -> AsyncIterator[Host]:
    """Serve a node whose arena has exactly `slots` slots of `kv_format`; `told` as in PeerSettings, without `peer_`.

    Args:
        formatted: whether a worker has come.
    """
    arena = folder / name
    arena.mkdir(exist_ok=True)
    size = max(2 * 4_096 + slots * (kv_format.block_bytes + 64), 1 << 16)
    settings = KvStoreSettings(
        server=ServerSettings(listen=listen, drain_seconds=1.0),
        store=StoreSettings(arena_bytes=size, arena_directory=arena, checksums=checksums),
        disk=disk or DiskSettings(),
        peers=PeerSettings(**{f"peer_{name}": value for name, value in told.items()}),  # type: ignore[arg-type]
        directory=replace(QUICK, redis_url=redis_url),
    )
    async with assembled(settings) as (server, node):
        if formatted:
            node.attach(kv_format, "")
        yield Host(server.address, node, arena)


async def written(store: Host, *names: int, terms: Terms = ORDINARY) -> Stored:
    """Store blocks (`content`) as a prefill worker does; its lease lives on."""
    async with worker(store, content(*names)) as client:
        return await client.write_blocks(None, named(*names), list(range(len(names))), terms)


async def released(store: Host, lease: Lease) -> None:
    store.blocks.release([lease.id])


def content(*names: int) -> npt.NDArray[np.uint8]:
    """What the blocks hold: uint8 [names, block_bytes]."""
    return np.concatenate([pages(1, seed=name) for name in names])


@asynccontextmanager
async def reader(store: Host, count: int) -> AsyncIterator[tuple[BlockStoreClient, npt.NDArray[np.uint8]]]:
    """A decode worker with so many pages."""
    rows = np.zeros((count, KV_FORMAT.block_bytes), dtype=np.uint8)
    async with worker(store, rows) as client:
        yield client, rows


async def read(
    store: Host, *names: int, source: Lease | None = None, terms: Terms = ORDINARY, deadline: float | None = None
) -> int:
    """Load leading blocks, which must hold what they should; answers how many there are. Its lease has ended then."""
    async with reader(store, len(names)) as (client, rows):
        pages_of = list(range(len(names)))
        loaded = await client.read_blocks(None, keys(*names), pages_of, terms, source=source, deadline=deadline)
        assert np.array_equal(rows[: loaded.blocks], content(*names)[: loaded.blocks])
        client.release(loaded.lease)
    return loaded.blocks


def held(store: Host, names: Sequence[int]) -> int:
    """How many leading blocks everyone sees there."""
    return store.blocks.lookup(keys(*names))
