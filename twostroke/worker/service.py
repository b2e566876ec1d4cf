"""WorkerService: who a worker is, its tokenizer, its load."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc

from twostroke.cluster import ModelInfo, Role, WorkerInfo, WorkerLoad
from twostroke.errors import InvalidRequest
from twostroke.rpc.gate import Gate
from twostroke.rpc.interceptor import Context
from twostroke.v1 import worker_pb2, worker_pb2_grpc
from twostroke.wire import worker as wire_worker
from twostroke.worker.worker import Worker

PIECE_BYTES = 1 << 20


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Answers for a prefill or a decode worker."""

    full_name = "twostroke.v1.WorkerService"

    def __init__(self, worker: Worker, role: Role, gate: Gate) -> None:
        self._worker = worker
        self._role = role
        self._gate = gate
        self._bundle = worker.bundle.to_bytes()

    def register(self, server: grpc.aio.Server) -> None:
        """Join a server."""
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: Context) -> worker_pb2.GetInfoResponse:
        """Say who this worker is."""
        return worker_pb2.GetInfoResponse(info=wire_worker.worker_info_pb(describe(self._worker, self._role)))

    async def GetTokenizer(
        self, request: worker_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[worker_pb2.GetTokenizerResponse]:
        """Send the tokenizer bundle in pieces."""
        for start in range(0, len(self._bundle), PIECE_BYTES):
            yield worker_pb2.GetTokenizerResponse(data=self._bundle[start : start + PIECE_BYTES])

    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        """Report the load every interval until the server stops."""
        if not 10 <= request.interval_ms <= 60_000:
            raise InvalidRequest("interval_ms must be from 10 to 60000", field="interval_ms")
        while True:
            draining = self._gate.closed
            yield worker_pb2.WatchLoadResponse(load=wire_worker.load_pb(load_of(self._worker, draining=draining)))
            if draining:
                await asyncio.sleep(request.interval_ms / 1_000)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(request.interval_ms / 1_000):
                    await self._gate.wait_closed()


def describe(worker: Worker, role: Role) -> WorkerInfo:
    """What a worker is."""
    config, kv_format = worker.loaded.config, worker.kv_format
    model = ModelInfo(
        id=worker.settings.served_name,
        architecture=config.architecture,
        context_tokens=min(config.max_positions, worker.engine.load().pages * kv_format.block_tokens),
        vocab_size=config.vocab_size,
        end_token_ids=config.end_token_ids,
        weight_mode=kv_format.weight_mode,
        tokenizer_digest=worker.bundle.digest,
        fingerprint=f"{kv_format.weight_mode}-{kv_format.digest.hex()[:12]}",
    )
    return WorkerInfo(
        incarnation=worker.incarnation,
        role=role,
        model=model,
        kv_format=kv_format,
        device=worker.loaded.model.backend.device.type,
        pages=worker.engine.load().pages,
        max_running=worker.settings.max_running,
        max_open=worker.settings.max_running + worker.settings.max_waiting,
    )


def load_of(worker: Worker, *, draining: bool) -> WorkerLoad:
    """How busy a worker is."""
    load = worker.engine.load()
    return WorkerLoad(
        running=load.running,
        waiting=load.waiting,
        waiting_tokens=load.waiting_tokens,
        free_pages=load.free_pages,
        evictable_pages=load.evictable_pages,
        steps=load.steps,
        draining=draining,
        store=worker.store.address,
    )
