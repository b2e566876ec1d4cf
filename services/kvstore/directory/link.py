"""Link: a Redis client that cannot hang, queue or retry behind its caller's back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

Ask = Callable[..., Awaitable[Any]]

SCHEMES = ("redis", "rediss", "unix")
CLOSE_SECONDS = 1.0


class RedisAway(Exception):
    """Redis did not do what it was asked: unreachable, silent, or it refused. Never leaves the directory."""


def shown(url: str) -> str:
    """The URL without user and password. Raises ValueError, without a word of the URL, when it is none."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        raise ValueError("must be redis://[[user]:password@]host[:port][/database], percent-encoded") from None
    if parts.scheme not in SCHEMES or not (parts.hostname or (parts.scheme == "unix" and parts.path)):
        raise ValueError("must be redis://, rediss:// or unix:// with a host or a path")
    if parts.query or parts.fragment:  # it would override the bounds set here
        raise ValueError("must have no options after ? or #")
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


class Link:
    """Bounded connections, made when needed and made anew when broken. The package is imported by the first link.

    Args:
        connections: operations in flight, at most; one more is RedisAway at once.
    """

    def __init__(self, url: str, connections: int) -> None:
        from redis import exceptions
        from redis.asyncio import ConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        self.url = shown(url)
        self._errors = exceptions
        self._pool = ConnectionPool.from_url(
            url,
            max_connections=connections,
            protocol=2,  # no push messages, no handshake
            driver_info=None,
            retry=Retry(NoBackoff(), 0),  # by default it tries ten times more
            socket_timeout=None,  # `within` ends what takes too long
            socket_connect_timeout=None,
        )
        self._client = Redis(connection_pool=self._pool)

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[Ask]:
        """Send commands inside the block, which is left after `seconds` at the latest. Raises RedisAway.

        A connection that is given up in the middle of an answer is closed: its answer can reach nobody else.
        """
        try:
            async with asyncio.timeout(seconds):
                yield self._client.execute_command
        except TimeoutError:
            raise RedisAway(f"no answer within {seconds:g} s") from None
        except Exception as error:  # also what comes of answers that no Redis gives
            raise RedisAway(self._told(error)) from error

    async def close(self) -> None:
        """Close every connection."""
        with contextlib.suppress(RedisAway):
            async with self.within(CLOSE_SECONDS):
                await self._pool.disconnect()

    def _told(self, error: Exception) -> str:
        """A cause to log. Servers may quote what they were sent, passwords too; only their first word is repeated."""
        kind = type(error).__name__
        if type(error) is self._errors.ConnectionError:  # the client's own words
            return f"{kind}: {error}"
        if type(error) is self._errors.ResponseError:
            return f"{kind}: {str(error).partition(' ')[0][:32]}"
        return kind
