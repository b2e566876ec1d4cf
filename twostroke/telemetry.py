"""Traces and logs. Spans have explicit parents, so none is held open across a yield by ambient context.

Without an OTLP endpoint a span is one small object that passes the caller's `traceparent` on; the SDK is not imported.
A collector that is dead or slow costs nothing either: spans leave in batches from a thread and are dropped when full.
"""

from __future__ import annotations

import contextvars
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from twostroke.settings import InvalidSetting, setting

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

TRACEPARENT = "traceparent"  # W3C Trace Context, level 1
SHUTDOWN_SECONDS = 3.0
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

# Set at the border of a request's task, and dies with the task: fields for every log line written under it.
log_fields: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar(
    "log_fields", default=MappingProxyType({})
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings:
    """Where traces go and how much is logged."""

    otlp_endpoint: str = setting("", help="OTLP gRPC endpoint for traces, such as http://127.0.0.1:4317; empty is off")
    trace_share: float = setting(1.0, help="share of requests without a sampled parent that are traced")
    log_level: str = setting("info", help="debug, info, warning or error")

    def __post_init__(self) -> None:
        if not 0 <= self.trace_share <= 1:
            raise InvalidSetting("trace_share", self.trace_share, "must lie between 0 and 1")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise InvalidSetting("log_level", self.log_level, "must be debug, info, warning or error")


class Span:
    """A stretch of one request's time; a context manager. This class records nothing: tracing is off."""

    def __init__(self, parent: str | None) -> None:
        self._parent = parent

    @property
    def traceparent(self) -> str | None:
        """W3C trace context for the next hop; None when there is no trace."""
        return self._parent

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """gRPC metadata that carries the trace to the next hop."""
        return ((TRACEPARENT, self.traceparent),) if self.traceparent else ()

    def child(self, name: str, **attributes: Any) -> Span:  # noqa: ARG002 - the recording kind uses them
        """A span inside this one."""
        return self

    def set(self, **attributes: Any) -> None:
        """Add attributes; `a__b` becomes `a.b`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the span; an error marks it."""


class RecordingSpan(Span):
    """A span of the OpenTelemetry SDK."""

    def __init__(self, tracer: Tracer, name: str, parent: Any, attributes: Mapping[str, Any]) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer = tracer
        self._span = tracer.start_span(name, context=parent, attributes=_dotted(attributes))
        self._context = set_span_in_context(self._span)

    @property
    def traceparent(self) -> str | None:
        """W3C trace context of this span."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def child(self, name: str, **attributes: Any) -> Span:
        """A span inside this one."""
        return RecordingSpan(self._tracer, name, self._context, attributes)

    def set(self, **attributes: Any) -> None:
        """Add attributes; `a__b` becomes `a.b`."""
        self._span.set_attributes(_dotted(attributes))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the span; an error marks it, by its class and never by its text."""
        if kind is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", getattr(error, "reason", kind.__name__))
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class Telemetry:
    """Makes the spans of one service."""

    def __init__(self, tracer: Tracer | None) -> None:
        self._tracer = tracer

    def span(self, name: str, *, parent: str | None = None, **attributes: Any) -> Span:
        """A span whose parent, if any, is the `traceparent` of another process."""
        if self._tracer is None:
            return Span(parent)
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract({TRACEPARENT: parent} if parent else {})
        return RecordingSpan(self._tracer, name, context, attributes)


@contextmanager
def telemetry(service: str, settings: TelemetrySettings) -> Iterator[Telemetry]:
    """Set up logs and traces for a process; leaving the block flushes spans for at most SHUTDOWN_SECONDS."""
    configure_logging(service, settings.log_level)
    if not settings.otlp_endpoint:
        yield Telemetry(None)
        return
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.trace_share)),
        resource=Resource.create({"service.name": f"twostroke-{service}"}),
        shutdown_on_exit=False,
    )
    insecure = not settings.otlp_endpoint.startswith("https://")
    exporter = OTLPSpanExporter(endpoint=settings.otlp_endpoint, insecure=insecure, timeout=2)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1_000))
    try:
        yield Telemetry(provider.get_tracer("twostroke"))
    finally:
        # The SDK may wait for a dead collector longer than we may take to stop.
        stopping = threading.Thread(target=provider.shutdown, daemon=True)
        stopping.start()
        stopping.join(SHUTDOWN_SECONDS)


def log_as(request_id: str, span: Span) -> None:
    """Let every log line of this task, and of tasks it starts, name the request and its trace."""
    fields = {"request_id": request_id}
    if span.traceparent is not None:
        fields["trace_id"] = span.traceparent.split("-")[1]
    log_fields.set(fields)


def traceparent_of(metadata: object) -> str | None:
    """The `traceparent` in gRPC invocation metadata or HTTP headers, if any."""
    pairs = metadata.items() if isinstance(metadata, Mapping) else metadata or ()
    for key, value in pairs:  # type: ignore[attr-defined]
        if key.lower() == TRACEPARENT and isinstance(value, str) and _TRACEPARENT.fullmatch(value):
            return value
    return None


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, service, event, the fields of the call, the fields of the request."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Render the record."""
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "event": record.getMessage(),
            **log_fields.get(),
            **{key: value for key, value in vars(record).items() if key not in _PLAIN},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def configure_logging(service: str, level: str) -> None:
    """Log JSON lines to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _dotted(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("__", "."): value for key, value in attributes.items() if value is not None}
