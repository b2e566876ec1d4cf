"""DecodeService: protobuf to domain and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from services.decode.admission import Admission
from twostroke import limits, wire
from twostroke.errors import FormatMismatch
from twostroke.handoff import DecodeOrder
from twostroke.rpc.deadline import deadline_of
from twostroke.rpc.interceptor import Context
from twostroke.telemetry import Telemetry, log_as, traceparent_of
from twostroke.v1 import decode_pb2, decode_pb2_grpc
from twostroke.wire import handoff
from twostroke.worker.attempts import Attempts
from twostroke.worker.worker import Worker


class DecodeService(decode_pb2_grpc.DecodeServiceServicer):
    """Writes the rest of answers."""

    full_name = "twostroke.v1.DecodeService"

    def __init__(self, worker: Worker, admission: Admission, telemetry: Telemetry) -> None:
        self._worker = worker
        self._admission = admission
        self._telemetry = telemetry
        self._attempts = Attempts()

    def register(self, server: grpc.aio.Server) -> None:
        """Join a server."""
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

    async def Decode(
        self, request: decode_pb2.DecodeRequest, context: Context
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        """Stream a choice's tokens."""
        self._worker.check_addressed(request.incarnation, request.format_digest)
        order = self._order(request)
        deadline = deadline_of(context, asyncio.get_running_loop())
        parent = traceparent_of(context.invocation_metadata())
        sequence, total = 0, len(order.emitted)
        with self._telemetry.span("twostroke.decode", parent=parent, choice=order.choice) as span:
            log_as(order.context.request_id, span)
            written = self._admission.run(order, deadline, span)
            async with self._attempts.running(order.context, order.choice), aclosing(written):
                async for news in written:
                    sequence, total = sequence + 1, total + len(news.tokens)
                    yield handoff.written_pb(news, sequence=sequence, total_tokens=total)
            span.set(output_tokens=total)

    async def Prefetch(self, request: decode_pb2.PrefetchRequest, context: Context) -> decode_pb2.PrefetchResponse:
        """Load blocks ahead of the order."""
        self._worker.check_addressed(request.incarnation, request.format_digest)
        most = -(-self._worker.loaded.config.max_positions // self._worker.kv_format.block_tokens)
        wire.check_keys(request.keys, most)
        lease = wire.lease(request.lease) if request.lease.id else None
        deadline = deadline_of(context, asyncio.get_running_loop())
        parent = traceparent_of(context.invocation_metadata())
        with self._telemetry.span("twostroke.prefetch", parent=parent, blocks=len(request.keys)) as span:
            prefix = await self._admission.prefetch(wire.context(request.context), tuple(request.keys), lease, deadline)
            span.set(local_blocks=prefix.local, joined_blocks=prefix.joined, loaded_blocks=prefix.loaded)
        return decode_pb2.PrefetchResponse(held_blocks=prefix.blocks)

    def _order(self, request: decode_pb2.DecodeRequest) -> DecodeOrder:
        order = handoff.decode_order(request)
        vocab_size = self._worker.loaded.config.vocab_size
        limits.check_token_ids("prompt", order.prompt, vocab_size)
        limits.check_token_ids("emitted", order.emitted, vocab_size)
        if order.ticket is not None and order.ticket.format_digest != self._worker.kv_format.digest:
            raise FormatMismatch("the ticket is for blocks of another format", field="ticket.format_digest")
        return order
