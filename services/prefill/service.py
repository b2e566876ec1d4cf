"""PrefillService: protobuf to domain and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from services.prefill.handoff import Handoff
from twostroke import limits
from twostroke.rpc.deadline import deadline_of
from twostroke.rpc.interceptor import Context
from twostroke.telemetry import Telemetry, log_as, traceparent_of
from twostroke.v1 import prefill_pb2, prefill_pb2_grpc
from twostroke.wire import handoff
from twostroke.worker.attempts import Attempts
from twostroke.worker.worker import Worker


class PrefillService(prefill_pb2_grpc.PrefillServiceServicer):
    """Runs prompts to their first token."""

    full_name = "twostroke.v1.PrefillService"

    def __init__(self, worker: Worker, telemetry: Telemetry) -> None:
        self._worker = worker
        self._telemetry = telemetry
        self._handoff = Handoff(worker)
        self._attempts = Attempts()

    def register(self, server: grpc.aio.Server) -> None:
        """Join a server."""
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """Stream progress, the first tokens and the ticket."""
        self._worker.check_addressed(request.incarnation, request.format_digest)
        order = handoff.prefill_order(request)
        limits.check_token_ids("prompt", order.prompt, self._worker.loaded.config.vocab_size)
        deadline = deadline_of(context, asyncio.get_running_loop())
        parent = traceparent_of(context.invocation_metadata())
        with self._telemetry.span("twostroke.prefill", parent=parent, attempt=order.context.attempt) as span:
            log_as(order.context.request_id, span)
            events = self._handoff.run(order, deadline, span)
            async with self._attempts.running(order.context), aclosing(events):
                async for event in events:
                    yield handoff.prefill_event_pb(event)
