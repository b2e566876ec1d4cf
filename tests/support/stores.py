"""KV store nodes in this process: real servers and arenas, with a clock that a test may move."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.kvstore.arena import open_arena
from services.kvstore.blocks import Blocks
from services.kvstore.node import Node
from services.kvstore.service import KvStoreService
from services.kvstore.settings import DiskSettings, StoreSettings
from twostroke.kv.blocks import BlockStoreClient, TransportChoice
from twostroke.kv.format import KvFormat
from twostroke.kv.limits import StoreStats
from twostroke.kv.transport.pages import HostPages
from twostroke.kv.transport.shm import SharedMemoryTransport
from twostroke.rpc.server import ServerSettings, serving

KV_FORMAT = KvFormat(
    model="tiny",
    weights_digest=bytes(16),
    weight_mode="f32",
    layers=1,
    kv_heads=1,
    head_dim=32,
    block_tokens=16,
    dtype="float32",
    rope_digest=bytes(16),
)
WAIT_SECONDS = 10.0


@dataclass
class Clock:
    """Seconds that pass only when a test says so."""

    now: float = 1_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Store:
    """A node that serves."""

    address: str
    node: Node
    directory: Path
    clock: Clock = field(default_factory=Clock)

    @property
    def blocks(self) -> Blocks:
        return self.node.blocks(self.node.incarnation)

    @property
    def stats(self) -> StoreStats:
        return self.node.stats()

    @property
    def idle(self) -> bool:
        """Whether nothing is reserved, in quarantine or leased."""
        stats = self.stats
        return (stats.reserved, stats.quarantined, stats.leases) == (0, 0, 0)

    @property
    def own_files(self) -> list[str]:
        """The arena, and the lock of the node as the writer of streamed blocks."""
        arena = f"twostroke-{self.node.incarnation}.arena"
        return [arena, f"{arena}.writer.{self.node.incarnation}"]

    def files(self) -> list[str]:
        """What lies in the arena's directory."""
        return sorted(path.name for path in self.directory.iterdir())


@asynccontextmanager
async def serving_store(
    directory: Path,
    *,
    listen: str = "127.0.0.1:0",
    slots: int = 16,
    kv_format: KvFormat = KV_FORMAT,
    disk: DiskSettings | None = None,
    **told: object,
) -> AsyncIterator[Store]:
    """Serve a node whose arena has exactly `slots` slots of `kv_format`; `told` as in StoreSettings."""
    size = 2 * 4_096 + slots * (kv_format.block_bytes + 64)
    settings = StoreSettings(arena_bytes=max(size, 1 << 16), arena_directory=directory, **told)  # type: ignore[arg-type]
    clock = Clock()
    with open_arena(directory, secrets.token_hex(8), settings.arena_bytes) as arena:
        node = Node(arena, settings, disk, clock=clock)
        async with serving(ServerSettings(listen=listen, drain_seconds=1.0), KvStoreService(node)) as server:
            node.address = server.address
            yield Store(server.address, node, directory, clock)
        await node.close()


def pages(count: int, kv_format: KvFormat = KV_FORMAT, *, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Pages of random bytes: uint8 [count, block_bytes]."""
    return np.random.default_rng(seed).integers(0, 256, (count, kv_format.block_bytes), dtype=np.uint8)


def key(name: int) -> bytes:
    return name.to_bytes(16, "little")


def keys(*names: int) -> list[bytes]:
    return [key(name) for name in names]


async def eventually(holds: Callable[[], bool]) -> None:
    """Return once something that other tasks or processes bring about is so; bounded."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not holds():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def worker(
    store: Store, rows: npt.NDArray[np.uint8], transport: TransportChoice = TransportChoice.SHARED_MEMORY
) -> AsyncIterator[BlockStoreClient]:
    """A worker's client of the store."""
    async with BlockStoreClient.opened(store.address, KV_FORMAT, HostPages(rows), transport=transport) as client:
        yield client


def named(*names: int, tokens: int = 16) -> list[tuple[bytes, int]]:
    """Blocks to be written."""
    return [(key(name), tokens) for name in names]


def shared_memory(client: BlockStoreClient) -> SharedMemoryTransport:
    """The client's transport, which must be shared memory."""
    transport = client._transport
    assert isinstance(transport, SharedMemoryTransport)
    return transport


@contextmanager
def copies_held(client: BlockStoreClient) -> Iterator[threading.Event]:
    """Nothing is copied before the event is set, or the block is left."""
    go = threading.Event()
    shared_memory(client)._thread.submit(go.wait, WAIT_SECONDS)
    try:
        yield go
    finally:
        go.set()


def copies_waiting(client: BlockStoreClient) -> int:
    """Copies that are to follow the one under way."""
    return shared_memory(client)._thread._work_queue.qsize()
