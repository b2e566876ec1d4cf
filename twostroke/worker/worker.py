"""A worker: one engine, one connection to the store, one identity."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from twostroke.engine.backends.choice import choose_backend, default_mode
from twostroke.engine.cache import kv_dtype
from twostroke.engine.cuda.kernels import prepare_kernels
from twostroke.engine.engine import Engine
from twostroke.engine.loading.shelf import WeightsCache
from twostroke.engine.weights import LoadedModel, load_model
from twostroke.errors import FormatMismatch, WorkerLost
from twostroke.folders import cache_folder
from twostroke.kv.blocks import BlockStoreClient
from twostroke.kv.format import KvFormat
from twostroke.kv.keys import request_root
from twostroke.kv.refs import Terms
from twostroke.rpc.server import ServerSettings, told_to_stop
from twostroke.settings import parse_bytes
from twostroke.text.bundle import TokenizerBundle
from twostroke.text.loading import load_bundle
from twostroke.types import RequestContext
from twostroke.worker.inflight import InFlight
from twostroke.worker.settings import OFF, WorkerSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What the servicers of a worker work with.

    Attributes:
        loads: blocks on their way from the store.
        writes: blocks on their way to the store for tickets.
    """

    incarnation: str
    loaded: LoadedModel
    bundle: TokenizerBundle
    kv_format: KvFormat
    engine: Engine
    store: BlockStoreClient
    loads: InFlight
    writes: InFlight
    settings: WorkerSettings

    def check_addressed(self, incarnation: str, format_digest: bytes) -> None:
        """Raise WorkerLost or FormatMismatch when a request means another worker than this one."""
        if incarnation != self.incarnation:
            raise WorkerLost("this worker was restarted since the request was placed", retry_after=0)
        if format_digest != self.kv_format.digest:
            raise FormatMismatch("the request is for another model, weight mode or block size", field="format_digest")

    def root(self, context: RequestContext) -> bytes:
        """Parent key of a request's first block."""
        return request_root(self.kv_format.digest, context)

    def terms(self, context: RequestContext) -> Terms:
        """How the store holds what is computed for a request."""
        return Terms(namespace=context.namespace, transient=not context.cache_policy.stores)

    async def until_told(self, server: ServerSettings) -> None:
        """Return when the process is told to stop. Raises Internal when the engine dies first."""
        waits = {asyncio.create_task(told_to_stop(server)), asyncio.create_task(self.engine.watch())}
        done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        for task in done:
            task.result()


@asynccontextmanager
async def started(settings: WorkerSettings) -> AsyncIterator[Worker]:
    """Load the model, start its engine and attach to the store; take all apart on leaving."""
    loaded, bundle = await asyncio.gather(
        asyncio.to_thread(_loaded, settings),
        asyncio.to_thread(load_bundle, settings.model),
    )
    backend = loaded.model.backend
    kv_format = loaded.kv_format(block_tokens=settings.block_tokens, kv=settings.kv_dtype)
    async with (
        Engine.start(settings.engine(pages=settings.pages(kv_format)), loaded.model, kv_format) as engine,
        BlockStoreClient.opened(
            settings.kvstore,
            kv_format,
            engine.cache.movable(),
            transport=settings.transport,
            lease_seconds=settings.lease_seconds,
        ) as store,
        InFlight.opened() as loads,
        InFlight.opened() as writes,
    ):
        log.info(
            "model ready",
            extra={
                "model": kv_format.model,
                "weights": kv_format.weight_mode,
                "kv": kv_format.dtype,
                "pages": engine.cache.pages,
                "backend": backend.name,
                "device": str(backend.device),
            },
        )
        yield Worker(
            incarnation=secrets.token_hex(8),
            loaded=loaded,
            bundle=bundle,
            kv_format=kv_format,
            engine=engine,
            store=store,
            loads=loads,
            writes=writes,
            settings=settings,
        )


def _loaded(settings: WorkerSettings) -> LoadedModel:
    """Load the model onto its device, and build the kernels it needs there."""
    backend = choose_backend(settings.device, mode=settings.weights, threads=settings.threads)
    mode = settings.weights or default_mode(backend)
    kv_dtype(settings.kv_dtype, mode, backend.dtype)  # refuses what cannot be before minutes of loading
    loaded = load_model(settings.model, mode=mode, backend=backend, cache=_weights_cache(settings))
    prepare_kernels(backend, loaded.config, log.info)
    return loaded


def _weights_cache(settings: WorkerSettings) -> WeightsCache | None:
    if settings.weights_cache == OFF:
        return None
    folder = Path(settings.weights_cache).expanduser() if settings.weights_cache else cache_folder(os.environ)
    return WeightsCache(
        folder=folder / "weights", max_bytes=parse_bytes("weights_cache_bytes", settings.weights_cache_bytes)
    )
