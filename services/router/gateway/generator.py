"""What the door needs from the rest of the router."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from twostroke.types import Advice, Advised, Event, GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A model that can be asked for."""

    id: str
    fingerprint: str  # names weights, mode and format; equal fingerprints give equal answers
    weight_mode: str
    context_tokens: int
    created: int  # Unix time at which the router first saw it


class Generator(Protocol):
    """Turns requests into events; every choice of policy is behind it."""

    def generate(self, request: GenerateRequest, deadline: float | None) -> AsyncGenerator[Event, None]:
        """Yield Started, then deltas, one ChoiceFinished per choice, and Usage last.

        Whatever makes a request refusable is found before Started, so that it still has a status of its own. Closing
        the generator stops the work everywhere.

        Args:
            request: checked by `twostroke.limits`.
            deadline: event loop time after which the generator ends with DeadlineExceeded.
        Raises: TwostrokeError.
        """

    async def advise(self, advice: Advice, request: GenerateRequest, deadline: float) -> Advised:
        """Advise the store about the blocks of a request's prompt; nothing but the prompt matters.

        Args:
            advice: what to do.
            request: checked by `twostroke.limits`.
            deadline: event loop time.
        Raises: TwostrokeError.
        """

    @property
    def models(self) -> Sequence[ModelCard]:
        """The models served; none until they can be asked for."""

    @property
    def readiness(self) -> str | None:
        """None when ready, else one line that says why not."""

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of a token; none for a control token."""

    def control_name(self, token_id: int) -> str | None:
        """What templates call a control token; None for every other token."""

    def render_metrics(self) -> bytes:
        """All metrics in the Prometheus text format."""
