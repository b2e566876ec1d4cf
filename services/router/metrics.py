"""The router's metrics, declared in one place; a fixed set of labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from twostroke.routing.stages import Event, Stage
from twostroke.types import Advice

if TYPE_CHECKING:
    from services.router.accounting import Account

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counts and times of requests as the router sees them. One registry of its own, nothing global."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter("twostroke_requests", "Requests by how they ended", ["outcome"], registry=registry)
        self._tokens = Counter(
            "twostroke_tokens",
            "Tokens of ended requests: prompt, completion, cached_local, cached_store",
            ["kind"],
            registry=registry,
        )
        self._first_token = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From receipt of a request to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self._between_tokens = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Time between tokens after the first, averaged over a request",
            buckets=_SECONDS,
            registry=registry,
        )
        self._duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "From receipt of a request to its end",
            buckets=_SECONDS,
            registry=registry,
        )
        self._retries = Counter(
            "twostroke_retries", "Attempts after the first, by cause", ["reason"], registry=registry
        )
        self._stages = Gauge(
            "twostroke_handoff_choices", "Choices of open requests, by where they are", ["stage"], registry=registry
        )
        self._events = Counter(
            "twostroke_handoff_events",
            "What happened to choices, by stage and event",
            ["stage", "event"],
            registry=registry,
        )
        self._waits = Histogram(
            "twostroke_handoff_seconds",
            "Time of a choice from what happened before to this event; streamed tokens are left out",
            ["stage", "event"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._advice = Counter(
            "twostroke_cache_advice",
            "Advice about the stored blocks of a prompt: good for all of them, for some or none, or why not",
            ["advice", "outcome"],
            registry=registry,
        )
        self._advised_blocks = Counter(
            "twostroke_cache_advised_blocks", "Blocks that advice was good for", ["advice"], registry=registry
        )
        self.open_requests = Gauge("twostroke_open_requests", "Requests in progress", registry=registry)
        self.workers = Gauge("twostroke_workers_available", "Workers that take work", ["role"], registry=registry)

    def retried(self, reason: str) -> None:
        """Count a second or later attempt."""
        self._retries.labels(reason.lower()).inc()

    def entered(self, stage: Stage) -> None:
        """Count a choice at its beginning."""
        self._stages.labels(stage.value).inc()

    def moved(self, before: Stage, event: Event, after: Stage, seconds: float) -> None:
        """Count what happened to a choice, so long after what happened before, and where it is now."""
        self._events.labels(before.value, event.name.lower()).inc()
        if event is not Event.TOKENS:
            self._waits.labels(before.value, event.name.lower()).observe(seconds)
        if after is not before:
            self._stages.labels(before.value).dec()
            if after is not Stage.DONE:
                self._stages.labels(after.value).inc()

    def advised(self, advice: Advice, outcome: str, blocks: int) -> None:
        """Count advice that was given to the store."""
        self._advice.labels(advice.value, outcome).inc()
        self._advised_blocks.labels(advice.value).inc(blocks)

    def ended(self, account: Account, outcome: str) -> None:
        """Count a request at its end."""
        self._requests.labels(outcome).inc()
        self._tokens.labels("prompt").inc(account.prompt_tokens)
        self._tokens.labels("completion").inc(account.completion_tokens)
        self._tokens.labels("cached_local").inc(account.cached.local)
        self._tokens.labels("cached_store").inc(account.cached.store)
        self._duration.observe(account.seconds)
        if account.first_token_seconds is not None:
            self._first_token.observe(account.first_token_seconds)
            if account.completion_tokens > 1:
                rest = account.seconds - account.first_token_seconds
                self._between_tokens.observe(rest / (account.completion_tokens - 1))

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self._registry)
