"""All four services in this process, each a real gRPC server on a free port, with a tiny model by default."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.decode.assembly import assembled as decode_service
from services.decode.settings import DecodeSettings
from services.kvstore.assembly import assembled as kvstore_service
from services.kvstore.directory.settings import DirectorySettings
from services.kvstore.node import Node
from services.kvstore.settings import DiskSettings, KvStoreSettings, StoreSettings
from services.prefill.assembly import assembled as prefill_service
from services.prefill.settings import PrefillSettings
from services.router.assembly import Doors
from services.router.assembly import assembled as router_service
from services.router.gateway.settings import GatewaySettings
from services.router.settings import DispatchSettings, RouterSettings
from tests.support.tiny import write_tiny
from tests.support.tiny_tokenizer import write_tiny_tokenizer
from twostroke.client import Client
from twostroke.engine.mode import KvMode, WeightMode
from twostroke.kv.blocks import TransportChoice
from twostroke.rpc.gate import Gate
from twostroke.rpc.server import ServerSettings
from twostroke.telemetry import Telemetry
from twostroke.worker.worker import Worker

SERVER = ServerSettings(drain_seconds=5.0)
SETTLE_SECONDS = 10.0


def tiny_model(folder: Path, **what: Any) -> Path:
    """A tiny model and its tokenizer in one folder; `what` as in `tests.support.tiny.Tiny`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tiny(folder, **{"max_positions": 4_096, **what})
    write_tiny_tokenizer(folder)
    return folder


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What to start."""

    model: Path
    prefill: int = 1
    decode: int = 1
    weights: WeightMode = WeightMode.F32
    kv: KvMode = KvMode.AUTO
    tokens_per_step: int = 512
    max_chunk: int | None = None
    max_running: int = 64
    max_waiting: int = 256
    kv_bytes: str = "64MiB"
    arena_bytes: int = 64 << 20
    disk: DiskSettings = field(default_factory=DiskSettings)
    directory: DirectorySettings = field(default_factory=DirectorySettings)
    transport: TransportChoice = TransportChoice.AUTO
    recompute_tokens: int = 256
    worker_wait_seconds: float = 10.0
    usage_log: Path | None = None
    api_keys: Path | None = None
    spans: Telemetry = field(default_factory=lambda: Telemetry(None))
    server: ServerSettings = SERVER


@dataclass(frozen=True)
class Cluster:
    """What runs."""

    shape: Shape
    kvstore: str
    node: Node
    prefill: list[Worker]
    decode: list[Worker]
    doors: Doors
    client: Client
    gates: list[Gate]  # of the prefill workers

    @property
    def workers(self) -> list[Worker]:
        return [*self.prefill, *self.decode]

    @property
    def http(self) -> str:
        return f"http://{self.doors.http}"

    async def settled(self) -> None:
        """Return once everything came back: sequences, pages, leases, slots. Fails when it does not."""
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                for worker in self.workers:
                    await worker.engine.idle()
                while self.held():
                    await asyncio.sleep(0.01)  # leases end by a call on its way, not by an event we could await
        except TimeoutError:
            raise AssertionError(f"still held: {self.held()}") from None

    def stages(self) -> list[str]:
        """The router's gauge of choices by stage, as /metrics shows it."""
        lines = self.doors.dispatch.render_metrics().decode().splitlines()
        return [line for line in lines if line.startswith("twostroke_handoff_choices{")]

    def held(self) -> list[str]:
        """What is still in use, in words."""
        stats = self.node.stats()
        found = [
            f"{name} {getattr(stats, name)}"
            for name in ("leases", "leased_blocks", "reserved", "quarantined")
            if getattr(stats, name)
        ]
        found += [line for line in self.stages() if not line.endswith(" 0.0")]
        for worker in self.workers:
            load = worker.engine.load()
            if load.lent_pages or load.running or load.waiting:
                found.append(f"{load}")
            if load.free_pages + load.evictable_pages != load.pages:
                found.append(f"{load.pages - load.free_pages - load.evictable_pages} pages")
        return found


@asynccontextmanager
async def started(shape: Shape) -> AsyncIterator[Cluster]:
    """Run a cluster inside the block; on leaving, prove that nothing is held, then take it apart."""
    async with AsyncExitStack() as stack:
        store = StoreSettings(arena_bytes=shape.arena_bytes)
        kvstore, node = await stack.enter_async_context(
            kvstore_service(
                KvStoreSettings(server=shape.server, store=store, disk=shape.disk, directory=shape.directory)
            )
        )
        prefill = [
            await stack.enter_async_context(
                prefill_service(PrefillSettings(**_worker(shape, kvstore.address)), shape.spans)
            )
            for _ in range(shape.prefill)
        ]
        decode = [
            await stack.enter_async_context(
                decode_service(
                    DecodeSettings(**_worker(shape, kvstore.address), recompute_tokens=shape.recompute_tokens),
                    shape.spans,
                )
            )
            for _ in range(shape.decode)
        ]
        router = RouterSettings(
            prefill=tuple(server.address for server, _ in prefill),
            decode=tuple(server.address for server, _ in decode),
            api_keys=shape.api_keys,
            server=shape.server,
            gateway=GatewaySettings(http_listen="127.0.0.1:0"),
            dispatch=DispatchSettings(worker_wait_seconds=shape.worker_wait_seconds, usage_log=shape.usage_log),
        )
        doors = await stack.enter_async_context(router_service(router, shape.spans))
        client = await stack.enter_async_context(Client(doors.grpc))
        async with asyncio.timeout(30):
            while doors.fleet.readiness is not None:
                await doors.fleet.changed()
        cluster = Cluster(
            shape,
            kvstore.address,
            node,
            [worker for _, worker in prefill],
            [worker for _, worker in decode],
            doors,
            client,
            [server.gate for server, _ in prefill],
        )
        yield cluster
        await cluster.settled()


def _worker(shape: Shape, kvstore: str) -> dict[str, Any]:
    return {
        "model": shape.model,
        "kvstore": kvstore,
        "weights": shape.weights,
        "weights_cache": "off",
        "kv_dtype": shape.kv,
        "kv_bytes": shape.kv_bytes,
        "tokens_per_step": shape.tokens_per_step,
        "max_chunk": shape.max_chunk,
        "max_running": shape.max_running,
        "max_waiting": shape.max_waiting,
        "transport": shape.transport,
        "server": shape.server,
    }
