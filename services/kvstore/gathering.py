"""Gathering: blocks that other hosts' nodes hold come into the arena before they are leased."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from services.kvstore.blocks import Blocks
from services.kvstore.directory.directory import Directory
from services.kvstore.fetching import Fetching, Holder, Order
from services.kvstore.settings import PeerSettings
from twostroke.kv.refs import Lease

log = logging.getLogger(__name__)

GRACE_SECONDS = 0.25  # that a caller waits beyond a fetch's time, for its last part
WORTH_SECONDS = 0.2  # that a fetch must have left for another node to be asked: less would be taken for its trouble
ANSWER_SECONDS = 0.05  # of a caller's time, kept for the answer
MAX_HOLDERS = 3  # nodes of the directory that are asked in one fetch, where those before bring nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a caller wants brought into the arena."""

    keys: Sequence[bytes]
    namespace: str = "default"  # whose share blocks take
    source: Lease | None = None  # at another node, which is asked first
    own_only: bool = False  # other nodes are not asked at all
    deadline: float | None = None  # on the loop's clock


class Gathering:
    """Has each block fetched once for all who ask for it meanwhile: from a caller's source, else by the directory.

    A fetch outlives who asked for it, and ends by its own time: its slots are being written to until its read ended.

    Args:
        directory: says who else holds blocks, where there is one.
    """

    def __init__(self, blocks: Blocks, fetching: Fetching, directory: Directory | None, settings: PeerSettings) -> None:
        self.refused = 0  # callers for whom nobody was asked, at the bound on fetches
        self.fetching = fetching
        self._blocks = blocks
        self._directory = directory
        self._settings = settings
        self._fetches: set[asyncio.Task[None]] = set()
        self._under_way: dict[bytes, asyncio.Task[None]] = {}  # by key

    @property
    def under_way(self) -> int:
        """Fetches."""
        return len(self._fetches)

    async def elsewhere(self, keys: Sequence[bytes]) -> int:
        """How many leading keys some other node holds, as far as the directory tells in time."""
        found = await self._directory.lookup(keys) if self._directory else ()
        return found[0].blocks if found else 0

    async def gather(self, lease: Lease, need: Need) -> None:
        """Bring what others hold of leading keys into the arena, under the lease, as far as there are room and time."""
        if need.source is None and not (self._directory and self._directory.peers):
            return
        clock = asyncio.get_running_loop().time
        end = clock() + self._settings.peer_seconds + GRACE_SECONDS
        if need.deadline is not None:
            end = min(end, need.deadline - ANSWER_SECONDS)
        while clock() < end and (missing := self._missing(lease, need.keys)):
            others = self._under_way.get(missing[0])
            task = others or self._begin(lease, missing, need)
            if task is None:
                return
            await asyncio.wait({task}, timeout=end - clock())
            if others is None:
                return

    async def close(self) -> None:
        """Break off what is under way and close all connections; the arena is still open."""
        for task in self._fetches:
            task.cancel()
        if self._fetches:
            await asyncio.wait(self._fetches)
        await self.fetching.close()

    def _missing(self, lease: Lease, keys: Sequence[bytes]) -> Sequence[bytes]:
        return keys[self._blocks.lookup(keys, lease.id) :]

    def _begin(self, lease: Lease, keys: Sequence[bytes], need: Need) -> asyncio.Task[None] | None:
        if len(self._fetches) >= self._settings.peer_fetches:
            self.refused += 1
            return None
        task = asyncio.create_task(self._fetch(lease, keys, need), name="fetch")
        self._fetches.add(task)
        for key in keys:
            self._under_way.setdefault(key, task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[None]) -> None:
        self._fetches.discard(task)
        self._under_way = {key: each for key, each in self._under_way.items() if each is not task}

    async def _fetch(self, lease: Lease, keys: Sequence[bytes], need: Need) -> None:
        """Ask the source, then those that the directory names, for what is still missing."""
        clock = asyncio.get_running_loop().time
        end = clock() + self._settings.peer_seconds
        source = need.source
        try:
            if source and source.incarnation != self._blocks.arena.incarnation:
                holder = Holder(source.address, source.incarnation, source)
                await self.fetching.fetch(Order(lease, keys, need.namespace), holder, end - clock())
                keys = self._missing(lease, keys)
            for holder in await self._holders(keys):
                if end - clock() < WORTH_SECONDS:
                    return
                if await self.fetching.fetch(Order(lease, keys, need.namespace), holder, end - clock()):
                    return
        except Exception:  # a defect here is a miss, and must not end the node
            log.exception("a fetch failed", extra={"blocks": len(keys)})

    async def _holders(self, keys: Sequence[bytes]) -> list[Holder]:
        """Who holds most, first."""
        found = await self._directory.lookup(keys) if self._directory and keys else ()
        return [Holder(each.peer.address, each.peer.incarnation) for each in found[:MAX_HOLDERS]]
