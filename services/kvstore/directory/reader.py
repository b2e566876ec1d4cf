"""Reader: asks Redis which nodes there are and what they hold."""

from __future__ import annotations

from collections.abc import Sequence

from services.kvstore.directory.link import Ask, Link
from services.kvstore.directory.names import Names
from services.kvstore.directory.peer import Holding, Peer

MAX_PEERS = 256
PART_KEYS = 256  # checked by one command inside the script
MAX_CHECKS = 16_384  # keys times nodes in one question: it keeps Redis, which does one thing at a time, for some 4 ms

# KEYS: sets of keys. ARGV: keys, 16 bytes each. For each set the number of leading keys in it; what is no set has none.
# A script, because plain commands answer key by key, which costs the client ten times what it costs Redis.
_RUNS = f"""
local runs, asked, going = {{}}, 0, true
for node = 1, #KEYS do runs[node] = 0 end
for first = 1, #ARGV[1], {PART_KEYS * 16} do
  if not going then break end
  local part = {{}}
  for at = first, math.min(first + {PART_KEYS * 16 - 1}, #ARGV[1]), 16 do
    part[#part + 1] = string.sub(ARGV[1], at, at + 15)
  end
  going = false
  for node = 1, #KEYS do
    if runs[node] == asked then
      for _, held in ipairs(redis.pcall('SMISMEMBER', KEYS[node], unpack(part))) do
        if held == 0 then break end
        runs[node] = runs[node] + 1
      end
      going = going or runs[node] == asked + #part
    end
  end
  asked = asked + #part
end
return runs
"""


class Reader:
    """Reads for one node. Every method raises RedisAway, after `seconds` at the latest."""

    def __init__(self, link: Link, names: Names, incarnation: str, seconds: float) -> None:
        self._link = link
        self._names = names
        self._myself = incarnation.encode()
        self._seconds = seconds

    async def peers(self) -> tuple[Peer, ...]:
        """The other nodes whose cards have not ended; the names of those that have are removed.

        A name that is removed just when its node comes back returns with that node's next write.
        """
        async with self._link.within(self._seconds) as ask:
            told = await ask("SRANDMEMBER", self._names.nodes, MAX_PEERS)
            names = [name for name in told if name != self._myself]
            if not names:
                return ()
            incarnations = [name.decode(errors="replace") for name in names]
            cards = await ask("MGET", *map(self._names.node, incarnations))
            if gone := [name for name, card in zip(names, cards, strict=True) if card is None]:
                await ask("SREM", self._names.nodes, *gone)
            peers = (Peer.from_card(name, card) for name, card in zip(incarnations, cards, strict=True) if card)
            return tuple(peer for peer in peers if peer is not None)

    async def holdings(self, peers: Sequence[Peer], keys: Sequence[bytes]) -> tuple[Holding, ...]:
        """How many leading keys each peer holds, the longest run first; those that hold none are left out.

        Redis checks every key of a run once, and PART_KEYS more for each peer. The answer is a number for each.
        """
        async with self._link.within(self._seconds) as ask:
            runs = await self._runs(ask, peers, keys)
        found = [Holding(peer, run) for peer, run in zip(peers, runs, strict=True) if run]
        return tuple(sorted(found, key=lambda holding: -holding.blocks))

    async def _runs(self, ask: Ask, peers: Sequence[Peer], keys: Sequence[bytes]) -> list[int]:
        """Several questions, each to the peers that hold all keys of those before."""
        names = [self._names.blocks(peer.incarnation) for peer in peers]
        runs, going, asked = [0] * len(names), list(range(len(names))), 0
        while going and asked < len(keys):
            part = keys[asked : asked + max(PART_KEYS, MAX_CHECKS // len(going))]
            counts = await ask("EVAL", _RUNS, len(going), *(names[each] for each in going), b"".join(part))
            for each, count in zip(going, counts, strict=True):
                runs[each] += count
            asked += len(part)
            going = [each for each in going if runs[each] == asked]
        return runs
