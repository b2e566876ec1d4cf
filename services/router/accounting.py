"""One append-only usage record per request, at every end it can have."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from services.router.metrics import Metrics
from twostroke.errors import TwostrokeError
from twostroke.types import CachedTokens, GenerateRequest

log = logging.getLogger(__name__)


class Account:
    """What one request has used so far."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._began = time.monotonic()
        self.first_token_seconds: float | None = None
        self.model = request.model
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached = CachedTokens()
        self.attempts = 0
        self.finish: list[str] = []

    @property
    def seconds(self) -> float:
        """Since the request came."""
        return time.monotonic() - self._began

    def note_token(self) -> None:
        """Note that there are tokens; the first time is the time to first token."""
        if self.first_token_seconds is None:
            self.first_token_seconds = self.seconds

    def record(self, outcome: str) -> dict[str, object]:
        """The record: outcome is completed, cancelled, or the reason of an error."""
        context = self._request.context
        return {
            "request_id": context.request_id,
            "tenant": context.tenant,
            "session": context.session,
            "model": self.model,
            "outcome": outcome,
            "finish_reasons": self.finish,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_local": self.cached.local,
            "cached_store": self.cached.store,
            "choices": self._request.n,
            "attempts": self.attempts,
            "seed": self._request.sampling.seed,
            "first_token_seconds": self.first_token_seconds and round(self.first_token_seconds, 6),
            "seconds": round(self.seconds, 6),
        }


class Ledger:
    """Where records go: a file, one JSON line each, or the log."""

    def __init__(self, file: TextIO | None, metrics: Metrics) -> None:
        self._file = file
        self._metrics = metrics

    @classmethod
    @contextmanager
    def opened(cls, path: Path | None, metrics: Metrics) -> Iterator[Ledger]:
        """Append to `path` inside the block, or log when there is none."""
        if path is None:
            yield cls(None, metrics)
            return
        with path.open("a", encoding="utf-8") as file:
            yield cls(file, metrics)

    @contextmanager
    def account(self, request: GenerateRequest) -> Iterator[Account]:
        """Account for a request inside the block and write its record when the block ends, however it ends."""
        account = Account(request)
        outcome = "cancelled"  # unless we learn better: the caller left, or the process stops
        try:
            yield account
            outcome = "completed"
        except TwostrokeError as error:
            outcome = error.reason.lower()
            raise
        except Exception:
            outcome = "internal"
            raise
        finally:
            self._metrics.ended(account, outcome)
            self._write(account.record(outcome))

    def _write(self, record: dict[str, object]) -> None:
        if self._file is None:
            log.info("usage", extra=record)
            return
        stamped = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **record}
        try:
            self._file.write(json.dumps(stamped) + "\n")
            self._file.flush()
        except OSError as error:  # a full disk must not take an answer that was given
            log.error("usage record not written", extra={"error": str(error), **record})
