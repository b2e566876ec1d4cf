"""What an operator may tell the directory."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from services.kvstore.directory.link import shown
from twostroke.settings import InvalidSetting, setting

MIN_SECONDS, MAX_SECONDS = 0.001, 60.0
MIN_TTL_SECONDS, MAX_TTL_SECONDS = 0.1, 3_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectorySettings:
    """The Redis in which nodes tell each other what they hold, and what it may cost when it is slow or away."""

    redis_url: str = dataclasses.field(
        default="",
        repr=False,  # it may hold a password
        metadata={"help": "redis://[[user]:password@]host[:port][/database] of the directory; empty: a node alone"},
    )
    redis_prefix: str = setting("twostroke", help="how all names in Redis begin")
    redis_lookup_seconds: float = setting(0.05, help="time limit of a lookup, after which nothing is known")
    redis_write_seconds: float = setting(1.0, help="time limit of one write")
    redis_retry_seconds: float = setting(5.0, help="between attempts to reach a Redis that is away, at most")
    directory_ttl_seconds: float = setting(15.0, help="how long entries outlive their node")
    directory_backlog: int = setting(65_536, help="changes that may wait for Redis before all is written anew")

    def __post_init__(self) -> None:
        try:
            if self.redis_url:
                shown(self.redis_url)
        except ValueError as error:
            raise InvalidSetting("redis_url", "", str(error)) from None
        if not re.fullmatch(r"[\w.:-]{1,64}", self.redis_prefix, re.ASCII):
            raise InvalidSetting("redis_prefix", self.redis_prefix, "must be up to 64 letters, digits, _ . : or -")
        for name in ("redis_lookup_seconds", "redis_write_seconds", "redis_retry_seconds"):
            if not MIN_SECONDS <= getattr(self, name) <= MAX_SECONDS:
                raise InvalidSetting(name, getattr(self, name), f"must be from {MIN_SECONDS:g} to {MAX_SECONDS:g}")
        if not MIN_TTL_SECONDS <= self.directory_ttl_seconds <= MAX_TTL_SECONDS:
            problem = f"must be from {MIN_TTL_SECONDS:g} to {MAX_TTL_SECONDS:g}"
            raise InvalidSetting("directory_ttl_seconds", self.directory_ttl_seconds, problem)
        if self.directory_backlog < 1:
            raise InvalidSetting("directory_backlog", self.directory_backlog, "must be at least 1")
