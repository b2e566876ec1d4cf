"""Directory: which other nodes hold the beginning of a prompt.

Redis is a convenience, never a condition: whatever happens to it, `add` and `remove` return at once, `lookup` knows
nothing within its time limit, and one task of the directory's own brings both sides into step again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

from services.kvstore.directory.breaker import Breaker, State
from services.kvstore.directory.holdings import Holdings
from services.kvstore.directory.link import Link, RedisAway
from services.kvstore.directory.names import Names
from services.kvstore.directory.peer import Holding, Peer
from services.kvstore.directory.reader import Reader
from services.kvstore.directory.registrar import EntriesLost, Registrar
from services.kvstore.directory.settings import DirectorySettings

log = logging.getLogger(__name__)

BEATS = 3  # writes in a time to live, at least: two may fail
GATHER_SECONDS = 0.01  # changes wait so long for others
MAX_LOOKUPS = 32  # at once; one more knows nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryStats:
    """How a directory is, and what it has done since it was opened."""

    state: State
    peers: int
    held: int  # keys of this node
    waiting: int  # changes that Redis has not been told
    lookups: int  # that asked Redis
    unasked: int  # lookups that knew nothing at once: Redis is away, or too many lookups are open
    failures: int  # lookups and writes without an answer
    writes: int
    rewrites: int  # of the whole set: the first, and each after a failure, a loss or an overflow
    overflows: int


class Directory:
    """One node's view of all nodes with the same block format, and their view of it.

    The node calls `add` and `remove` in the same step in which it commits and evicts. Keys have 16 bytes.
    """

    def __init__(self, settings: DirectorySettings, me: Peer, format_digest: bytes, link: Link) -> None:
        names = Names(settings.redis_prefix, format_digest)
        self._holdings = Holdings(settings.directory_backlog)
        self._link = link
        self._reader = Reader(link, names, me.incarnation, settings.redis_lookup_seconds)
        self._registrar = Registrar(link, names, me, settings, self._holdings)
        self._breaker = Breaker(settings.redis_retry_seconds, random.random)
        self._beat_seconds = settings.directory_ttl_seconds / BEATS
        self._next_beat = 0.0
        self._peers: tuple[Peer, ...] = ()
        self._work = asyncio.Event()  # changes wait, or Redis is to be probed
        self._open = self._lookups = self._unasked = self._failures = 0
        self._keeping: asyncio.Task[None] | None = None

    @staticmethod
    def link(settings: DirectorySettings) -> Link:
        """A link for one directory, which is not used before `started`. It imports the client of Redis."""
        return Link(settings.redis_url, MAX_LOOKUPS + 1)

    @classmethod
    def started(cls, settings: DirectorySettings, me: Peer, format_digest: bytes, link: Link) -> Self:
        """Keep this node's entries in Redis until `close`.

        Nodes with another `format_digest` (of their KvFormat) do not exist here.
        """
        directory = cls(settings, me, format_digest, link)
        directory._keeping = asyncio.create_task(directory._keep(), name="directory")
        return directory

    @classmethod
    @asynccontextmanager
    async def running(cls, settings: DirectorySettings, me: Peer, format_digest: bytes) -> AsyncIterator[Self]:
        """Keep this node's entries in Redis inside the block; leaving it takes them back."""
        directory = cls.started(settings, me, format_digest, cls.link(settings))
        try:
            yield directory
        finally:
            await directory.close()

    async def close(self) -> None:
        """Take the entries back, if Redis is there, and close the link. Bounded by its time limits."""
        if self._keeping:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        await self._leave()

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The other nodes, as of the last heartbeat; none while Redis is away."""
        return self._peers

    def add(self, keys: Iterable[bytes]) -> None:
        """Blocks of these keys can be read here from now on."""
        self._holdings.add(keys)
        self._work.set()

    def remove(self, keys: Iterable[bytes]) -> None:
        """Blocks of these keys can no longer be read here."""
        self._holdings.remove(keys)
        self._work.set()

    async def lookup(self, keys: Sequence[bytes]) -> tuple[Holding, ...]:
        """Which peers hold leading keys, the longest run first; empty where nothing is known. Never raises.

        A hint: a peer may have evicted since, and one that died is believed for a time to live.
        """
        if not self._breaker.up or self._open >= MAX_LOOKUPS:
            self._unasked += 1
            return ()
        if not self._peers or not keys:
            return ()
        self._open += 1
        self._lookups += 1
        try:
            found = await self._reader.holdings(self._peers, keys)
        except RedisAway as error:
            self._failures += 1
            if self._breaker.failed():
                self._away(error)
            return ()
        finally:
            self._open -= 1
        self._breaker.answered()
        return found

    def stats(self) -> DirectoryStats:
        """How the directory is."""
        return DirectoryStats(
            state=self._breaker.state,
            peers=len(self._peers),
            held=len(self._holdings),
            waiting=self._holdings.waiting,
            lookups=self._lookups,
            unasked=self._unasked,
            failures=self._failures,
            writes=self._registrar.writes,
            rewrites=self._registrar.rewrites,
            overflows=self._holdings.overflows,
        )

    async def _keep(self) -> None:
        """Tell Redis what changes, beat, and probe it while it is away, until cancelled."""
        while True:
            self._work.clear()
            try:
                await self._turn()
            except RedisAway as error:
                self._failures += 1
                if self._breaker.open():
                    self._away(error)
            except EntriesLost:
                self._failures += 1
                await asyncio.sleep(self._breaker.pause())
            await self._rest()

    async def _turn(self) -> None:
        """Write once. Raises RedisAway, EntriesLost.

        A beat begins with a read, under the time limit of lookups: Redis is not up while it is too slow for those.
        """
        now = asyncio.get_running_loop().time()
        beats = now >= self._next_beat or not self._breaker.up
        if beats:
            self._peers = await self._reader.peers()
        await self._registrar.tell()
        if beats:
            self._next_beat = now + self._beat_seconds
            if self._breaker.close():
                log.info("the directory is there", extra={"redis": self._link.url, "peers": len(self._peers)})

    async def _rest(self) -> None:
        """Return when there is something to do."""
        if self._breaker.up and not (self._holdings.waiting or self._holdings.uncertain):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._next_beat):
                    await self._work.wait()
        await asyncio.sleep(GATHER_SECONDS if self._breaker.up else self._breaker.pause())

    async def _leave(self) -> None:
        if self._breaker.up:
            with contextlib.suppress(RedisAway):  # then the entries end by time
                await self._registrar.leave()
        await self._link.close()

    def _away(self, error: RedisAway) -> None:
        """Say once that Redis is away, and have it probed."""
        self._peers = ()
        self._work.set()
        log.warning(
            "the directory is away; this node serves alone", extra={"redis": self._link.url, "error": str(error)}
        )
