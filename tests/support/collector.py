"""An OTLP collector on a free port that keeps what it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


@dataclass(frozen=True)
class Seen:
    """One span."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    seconds: float
    attributes: Mapping[str, Any]


@dataclass
class Collector(TraceServiceServicer):
    """Spans in order of arrival."""

    spans: list[Seen] = field(default_factory=list)
    address: str = ""

    async def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
        for resource in request.resource_spans:
            service = {each.key: each.value.string_value for each in resource.resource.attributes}["service.name"]
            for span in (each for scope in resource.scope_spans for each in scope.spans):
                attributes = {
                    each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value")
                    for each in span.attributes
                }
                self.spans.append(
                    Seen(
                        service,
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                        attributes,
                    )
                )
        return ExportTraceServiceResponse()

    async def until(self, *names: str) -> None:
        """Return once spans of all these names are here."""
        async with asyncio.timeout(30):
            while not set(names) <= {span.name for span in self.spans}:
                await asyncio.sleep(0.02)

    @classmethod
    @asynccontextmanager
    async def started(cls) -> AsyncIterator[Collector]:
        collector, server = cls(), grpc.aio.server()
        add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
        collector.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield collector
        finally:
            await server.stop(grace=None)
