"""What can be told to the prefill service: nothing beyond what every worker is told."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.worker.settings import WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSettings(WorkerSettings):
    """Runs prompts to their first token and leaves their blocks in the store."""
