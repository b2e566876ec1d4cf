"""What can be told to the decode service."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.settings import InvalidSetting, setting
from twostroke.worker.settings import WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings(WorkerSettings):
    """Loads prompts from the store and writes the rest of the answers."""

    tokens_per_step: int = setting(128, help="tokens of one forward pass; a prompt's share of it delays every stream")
    recompute_tokens: int = setting(256, help="most tokens to compute here when blocks of a ticket are missing")
    publish_queue: int = setting(256, help="filled blocks that may wait to be published; more are not published")

    def __post_init__(self) -> None:
        WorkerSettings.__post_init__(self)
        if self.recompute_tokens < 1:
            raise InvalidSetting("recompute_tokens", self.recompute_tokens, "must be at least 1")
        if self.publish_queue < 1:
            raise InvalidSetting("publish_queue", self.publish_queue, "must be at least 1")
