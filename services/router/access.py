"""Who is let in: everybody, or who has a key of the file. The file is read again while it changes."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from twostroke.access.bearer import presented
from twostroke.access.caller import Caller
from twostroke.access.keyfile import ApiKey, InvalidKeyFile, digest_of, parse, read
from twostroke.errors import Unauthenticated
from twostroke.settings import InvalidSetting

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0  # how soon a change of the file is noticed
NOBODY = ApiKey(digest=bytes(32), caller=Caller())  # no key has this hash


class Access(Protocol):
    """Tells who asks, at both doors."""

    def caller(self, authorizations: Sequence[str]) -> Caller:
        """Who sends these values of the header Authorization. Raises Unauthenticated."""


class Everybody:
    """No keys are asked for, and a key that is sent means nothing."""

    def caller(self, authorizations: Sequence[str]) -> Caller:  # noqa: ARG002 - whatever they are
        """The one tenant there is."""
        return Caller()


class KeyRing:
    """The keys of a file, by their hash."""

    def __init__(self, path: Path, raw: bytes) -> None:
        self._path = path
        self._seen: bytes | None = raw  # what the file held when last looked at; None when it could not be read
        self._keys = _by_digest(raw)

    def caller(self, authorizations: Sequence[str]) -> Caller:
        """Who has the key that is presented. Raises Unauthenticated.

        How long this takes depends on the hash of what was presented, which nobody can steer towards that of a key.
        """
        digest = digest_of(presented(authorizations))
        key = self._keys.get(digest, NOBODY)
        if not hmac.compare_digest(key.digest, digest):
            raise Unauthenticated("this API key is not known here")
        return key.caller

    async def refresh(self) -> None:
        """Take over what the file says now. Of one that is broken a line is logged, once, and the old keys stay.

        The whole file is compared: times of files are too coarse to tell two quick changes apart.
        """
        raw = None
        try:
            raw = await asyncio.to_thread(read, self._path)
            if raw == self._seen:
                return
            self._keys = await asyncio.to_thread(_by_digest, raw)
            log.info("API keys read", extra={"file": str(self._path), "keys": len(self._keys)})
        except InvalidKeyFile as error:
            if raw is not None or self._seen is not None:
                log.error("API keys not read; the old ones stay", extra={"file": str(self._path), "error": str(error)})
        self._seen = raw

    async def follow(self) -> None:
        """Refresh for ever."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await self.refresh()


@asynccontextmanager
async def access(path: Path | None) -> AsyncIterator[Access]:
    """Who is let in, by the file at `path`, followed inside the block; without one, everybody.

    Raises: InvalidSetting, when the file cannot be used.
    """
    if path is None:
        yield Everybody()
        return
    try:
        ring = KeyRing(path, await asyncio.to_thread(read, path))
    except InvalidKeyFile as error:
        raise InvalidSetting("api_keys", path, str(error)) from error
    following = asyncio.create_task(ring.follow(), name="api keys")
    try:
        yield ring
    finally:
        following.cancel()
        await asyncio.wait({following})


def _by_digest(raw: bytes) -> Mapping[bytes, ApiKey]:
    return {key.digest: key for key in parse(raw)}
