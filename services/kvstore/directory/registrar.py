"""Registrar: writes into Redis what one node holds, so that it is either right or about to be.

Every key has a time to live that each write renews, so that a node's entries end together with it.
The marker names the last write. Each write replaces the marker of the one before, or does nothing where that is not
found. So a write learns at once when Redis was emptied, went back to an older state or evicted the set; and one that
was given up, but still lies in some buffer, comes to nothing when it arrives after the set was written anew.
"""

from __future__ import annotations

import itertools

from services.kvstore.directory.holdings import Changes, Holdings
from services.kvstore.directory.link import Link
from services.kvstore.directory.names import Names
from services.kvstore.directory.peer import Peer
from services.kvstore.directory.settings import DirectorySettings

BATCH_KEYS = 2_048  # in one write: 32 KiB, so that a connection to a stopped server takes all of it and can be closed

# KEYS: the node's set, its card, all nodes, the set to write to. ARGV: marker to find (empty: start with nothing),
# marker to leave, keys to remove, keys to add, milliseconds to live, card, incarnation. 1, or 0 without the marker.
# The first command that writes is one that a full Redis refuses: then nothing is written, instead of beyond its limit.
_WRITE = """
local target, before, ttl = KEYS[4], ARGV[1], ARGV[5]
if before ~= '' and redis.call('SISMEMBER', target, before) == 0 then return 0 end
redis.call('SET', KEYS[2], ARGV[6], 'PX', ttl)
if before == '' then redis.call('UNLINK', target) else redis.call('SREM', target, before) end
for which, command in ipairs({'SREM', 'SADD'}) do
  local keys = ARGV[which + 2]
  for first = 1, #keys, 16384 do
    local part = {}
    for at = first, math.min(first + 16383, #keys), 16 do part[#part + 1] = string.sub(keys, at, at + 15) end
    redis.call(command, target, unpack(part))
  end
end
redis.call('SADD', target, ARGV[2])
redis.call('PEXPIRE', target, ttl)
redis.call('PEXPIRE', KEYS[1], ttl)
redis.call('SADD', KEYS[3], ARGV[7])
redis.call('PEXPIRE', KEYS[3], ttl)
return 1
"""

# KEYS: the node's set, the one written anew. ARGV: the latter's marker. 1, or 0 without the marker.
_REPLACE = """
if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 0 then return 0 end
redis.call('RENAME', KEYS[2], KEYS[1])
return 1
"""


class EntriesLost(Exception):
    """Redis no longer knows what it was told. Never leaves the directory."""


class Registrar:
    """Tells Redis what changed, or everything where it is uncertain what Redis knows. One call at a time."""

    def __init__(self, link: Link, names: Names, me: Peer, settings: DirectorySettings, holdings: Holdings) -> None:
        self.writes = 0
        self.rewrites = 0
        self._link = link
        self._names = names
        self._me = me
        self._settings = settings
        self._holdings = holdings
        self._blocks, self._anew = names.blocks(me.incarnation), names.anew(me.incarnation)
        self._count = itertools.count(1)
        self._marker = b""  # of 8 bytes where a key has 16; none is used twice

    async def tell(self) -> None:
        """Write the oldest changes, or the whole set and then changes; without any it is a heartbeat.

        Raises: RedisAway, EntriesLost; either way the next call writes the whole set.
        """
        try:
            if self._holdings.uncertain:
                await self._write_anew()
            await self._write(self._blocks, self._holdings.take(BATCH_KEYS))
        except BaseException:
            self._holdings.doubt()
            raise

    async def leave(self) -> None:
        """Take everything back at once. Raises RedisAway."""
        async with self._link.within(self._settings.redis_write_seconds) as ask:
            await ask("UNLINK", self._names.node(self._me.incarnation), self._blocks, self._anew)
            await ask("SREM", self._names.nodes, self._me.incarnation)

    async def _write_anew(self) -> None:
        """Build the whole set beside the one in use and put it in its place in one step.

        Until then readers see the old one, which every part of the new one keeps alive.
        """
        self.rewrites += 1
        keys = self._holdings.whole()
        self._marker = b""
        for first in range(0, len(keys) or 1, BATCH_KEYS):
            await self._write(self._anew, Changes(added=tuple(keys[first : first + BATCH_KEYS])))
        async with self._link.within(self._settings.redis_write_seconds) as ask:
            replaced = await ask("EVAL", _REPLACE, 2, self._blocks, self._anew, self._marker)
        if not replaced:
            raise EntriesLost

    async def _write(self, target: str, changes: Changes) -> None:
        me, names = self._me, self._names
        marker = next(self._count).to_bytes(8)
        keys = (self._blocks, names.node(me.incarnation), names.nodes, target)
        told = (self._marker, marker, b"".join(changes.removed), b"".join(changes.added))
        milliseconds = round(self._settings.directory_ttl_seconds * 1_000)
        async with self._link.within(self._settings.redis_write_seconds) as ask:
            written = await ask("EVAL", _WRITE, len(keys), *keys, *told, milliseconds, me.card(), me.incarnation)
        if not written:
            raise EntriesLost
        self._marker = marker
        self.writes += 1
