"""One worker as the router knows it: its connection, what it says of itself, what was sent to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager

import grpc

from twostroke import wire
from twostroke.cluster import Role, WorkerInfo, WorkerLoad
from twostroke.errors import TwostrokeError, Unavailable, WorkerLost
from twostroke.handoff import DecodeOrder, First, Handover, PrefillOrder, Progress, Written
from twostroke.kv.refs import Lease
from twostroke.rpc.channel import connect
from twostroke.rpc.deadline import remaining
from twostroke.rpc.status import domain_errors
from twostroke.telemetry import Span
from twostroke.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from twostroke.wire import handoff
from twostroke.wire import worker as worker_wire

log = logging.getLogger(__name__)

INFO_SECONDS = 5.0
TOKENIZER_SECONDS = 60.0
PREFETCH_SECONDS = 10.0
REPORT_MS = 250
LONGEST_CALL_SECONDS = 86_400.0


class Member:
    """A worker at a fixed address, through all its incarnations.

    Attributes:
        address: host:port.
        role: what it is asked to do.
        info: what it says of itself; None while it cannot be reached.
        load: its latest report.
        pending_tokens: prompt tokens sent there whose first token has not come yet.
        open_streams: answers that it is writing for this router.
        last_chosen: number of the decision that chose it last.
    """

    def __init__(self, address: str, role: Role, silence_seconds: float) -> None:
        self.address = address
        self.role = role
        self.info: WorkerInfo | None = None
        self.load = WorkerLoad()
        self.pending_tokens = 0
        self.open_streams = 0
        self.last_chosen = 0
        self._silence_seconds = silence_seconds
        self._calls: set[grpc.aio.Call] = set()
        self._connect()

    def _connect(self) -> None:
        self._channel = connect(self.address)
        self._worker = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._prefill = prefill_pb2_grpc.PrefillServiceStub(self._channel)
        self._decode = decode_pb2_grpc.DecodeServiceStub(self._channel)

    async def reconnect(self) -> None:
        """Leave the connection, which may be lost without a word, for a new one; calls on it end."""
        lost = self._channel
        self._connect()
        await lost.close()

    def forget(self) -> None:
        """What was said by an incarnation that is gone holds for no other; its calls end as WorkerLost."""
        self.info = None
        self.load = WorkerLoad()
        calls, self._calls = self._calls, set()
        for call in calls:  # a worker that is stuck would hold them open until the transport gives up
            call.cancel()

    @property
    def incarnation(self) -> str | None:
        """Of the worker that is there now; None when none is."""
        return self.info.incarnation if self.info else None

    @property
    def available(self) -> bool:
        """Whether new work may go there."""
        return self.info is not None and not self.load.draining

    async def close(self) -> None:
        """End the connection and all calls on it."""
        await self._channel.close()

    async def introduce(self) -> WorkerInfo:
        """Ask who is there, as soon as somebody is. Raises TwostrokeError, when nobody is for INFO_SECONDS."""
        with domain_errors():
            response = await self._worker.GetInfo(
                worker_pb2.GetInfoRequest(), timeout=INFO_SECONDS, wait_for_ready=True
            )
        info = worker_wire.worker_info(response.info)
        if info.role is not self.role:
            raise WorkerLost(f"{self.address} is a {info.role.value} worker, not a {self.role.value} worker")
        return info

    async def tokenizer(self, limit: int) -> bytes:
        """Fetch the tokenizer bundle. Raises TwostrokeError, also when it is larger than `limit` bytes."""
        data = bytearray()
        with domain_errors():
            async for piece in self._worker.GetTokenizer(worker_pb2.GetTokenizerRequest(), timeout=TOKENIZER_SECONDS):
                data += piece.data
                if len(data) > limit:
                    raise Unavailable(f"the tokenizer of {self.address} is over {limit} bytes")
        return bytes(data)

    async def watch(self, on_change: Callable[[], None]) -> None:
        """Keep `load` fresh until the worker is lost; `on_change` is told when it starts or stops to take work.

        Returns when the worker ends the stream. Raises: WorkerLost.
        """
        request = worker_pb2.WatchLoadRequest(interval_ms=REPORT_MS)
        with domain_errors():
            reports = self._worker.WatchLoad(request)
            try:
                while True:
                    async with asyncio.timeout(self._silence_seconds):
                        report = await reports.read()
                    if not isinstance(report, worker_pb2.WatchLoadResponse):  # the end of the stream
                        return
                    before, self.load = self.available, worker_wire.load(report.load)
                    if self.available != before:
                        on_change()
            except TimeoutError:
                raise WorkerLost(f"{self.address} has been silent for {self._silence_seconds:g} s") from None
            finally:
                reports.cancel()

    def _addressed(self) -> tuple[str, bytes]:
        if self.info is None:
            raise WorkerLost(f"{self.address} cannot be reached")
        return self.info.incarnation, self.info.kv_format.digest

    @contextmanager
    def _open(self, call: grpc.aio.Call) -> Iterator[None]:
        """Read a call inside the block; leaving it cancels the call. Raises TwostrokeError."""
        self._calls.add(call)
        task = asyncio.current_task()
        try:
            with domain_errors():
                yield
        except asyncio.CancelledError:
            if call in self._calls or (task is not None and task.cancelling()):
                raise
            raise WorkerLost(f"{self.address} does not answer any more") from None
        finally:
            self._calls.discard(call)
            call.cancel()

    async def prefill(
        self, order: PrefillOrder, deadline: float, span: Span
    ) -> AsyncGenerator[Progress | First | Handover, None]:
        """Run a prompt. Leaving the iterator cancels the call. Raises TwostrokeError."""
        incarnation, digest = self._addressed()
        request = handoff.prefill_order_pb(order, incarnation=incarnation, format_digest=digest)
        seconds = remaining(deadline, at_most=LONGEST_CALL_SECONDS)
        tokens = len(order.prompt)
        self.pending_tokens += tokens
        call = self._prefill.Prefill(request, timeout=seconds, metadata=span.metadata)
        try:
            with self._open(call):
                async for response in call:
                    event = handoff.prefill_event(response)
                    if isinstance(event, First):
                        self.pending_tokens, tokens = self.pending_tokens - tokens, 0
                    yield event
        finally:
            self.pending_tokens -= tokens

    async def decode(self, order: DecodeOrder, deadline: float, span: Span) -> AsyncGenerator[Written, None]:
        """Write a choice. Leaving the iterator cancels the call.

        Raises: TwostrokeError; WorkerLost also when messages or tokens are missing, or come twice.
        """
        incarnation, digest = self._addressed()
        request = handoff.decode_order_pb(order, incarnation=incarnation, format_digest=digest)
        seconds = remaining(deadline, at_most=LONGEST_CALL_SECONDS)
        self.open_streams += 1
        call = self._decode.Decode(request, timeout=seconds, metadata=span.metadata)
        sequence, total = 0, len(order.emitted)
        try:
            with self._open(call):
                async for response in call:
                    sequence, total = sequence + 1, total + len(response.tokens)
                    if (response.sequence, response.total_tokens) != (sequence, total):
                        raise WorkerLost(f"message {sequence} of {self.address} is not the one that was due")
                    yield handoff.written(response)
        finally:
            self.open_streams -= 1

    async def prefetch(self, order: PrefillOrder, keys: Sequence[bytes], lease: Lease, span: Span) -> None:
        """Let a decode worker load blocks ahead of its order. A hint: trouble is logged and forgotten."""
        try:
            incarnation, digest = self._addressed()
            request = decode_pb2.PrefetchRequest(
                context=wire.context_pb(order.context),
                incarnation=incarnation,
                format_digest=digest,
                keys=keys,
                lease=wire.lease_pb(lease),
            )
            with domain_errors():
                await self._decode.Prefetch(request, timeout=PREFETCH_SECONDS, metadata=span.metadata)
        except TwostrokeError as error:
            log.info("prefetch failed", extra={"worker": self.address, "reason": error.reason})
