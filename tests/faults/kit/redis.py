"""Where the directory of two store nodes can be struck, and how."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass


class Ask(enum.Enum):
    """What a node asks of Redis, told by a word that no other command of its has."""

    LOOKUP = b"SMISMEMBER"  # who holds a prompt's beginning: the node that lacks it asks
    WRITE = b"PEXPIRE"  # what a node holds: the one that has just stored a prompt tells
    BEAT = b"SRANDMEMBER"  # who is there, before each heartbeat


class Outage(enum.Enum):
    """What happens while the command is on its way."""

    STOPPED = "redis stopped"  # SIGSTOP, and SIGCONT
    KILLED = "redis killed"  # kill -9, and started again with nothing in it
    SWALLOWED = "redis black-holed"  # connections stay, nothing comes back
    REFUSED = "redis refuses"  # connections end, and none is taken
    EMPTIED = "redis emptied"  # it goes on, and knows nothing any more
    SLOW = "redis slow"  # by a second


@dataclass(frozen=True)
class RedisCase:
    """A command and an outage."""

    ask: Ask
    blow: Outage

    @property
    def name(self) -> str:
        """As the table shows it."""
        return f"directory/{self.ask.name.lower()}, {self.blow.value}"

    @property
    def lasts(self) -> bool:
        """Whether the outage goes on until both nodes have given Redis up."""
        return self.blow not in (Outage.EMPTIED, Outage.SLOW)


def redis_cases() -> Iterator[RedisCase]:
    """Every case."""
    for ask in (Ask.LOOKUP, Ask.WRITE):
        for blow in Outage:
            yield RedisCase(ask, blow)
    yield RedisCase(Ask.BEAT, Outage.STOPPED)
    yield RedisCase(Ask.BEAT, Outage.KILLED)
