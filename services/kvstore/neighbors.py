"""Neighbors: the nodes of other hosts that this one has a connection to, and which of them are in trouble."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.kvstore.neighbor import Neighbor
from twostroke.errors import FormatMismatch, NotFound, TwostrokeError, WorkerLost
from twostroke.kv.format import KvFormat

log = logging.getLogger(__name__)

PAUSE_SECONDS = 5.0  # after trouble
FOREIGN_SECONDS = 60.0  # after the neighbor turned out to hold blocks of another format


class Neighbors:
    """Neighbors by address. One that fails is left alone for a while: its trouble costs a caller one try in that time.

    Args:
        most: connections that are kept; beyond that the one that was used least recently is closed.
    """

    def __init__(self, kv_format: KvFormat, most: int) -> None:
        self.failures = 0
        self._format = kv_format
        self._most = most
        self._open: dict[str, Neighbor] = {}  # least recently used first
        self._uses: Counter[str] = Counter()  # under way
        self._paused: dict[str, float] = {}  # until when, on the loop's clock

    def __len__(self) -> int:
        return len(self._open)

    def is_paused(self, address: str) -> bool:
        """Whether the neighbor was in trouble a moment ago."""
        now = asyncio.get_running_loop().time()
        self._paused = {each: until for each, until in self._paused.items() if until > now}
        return address in self._paused

    @asynccontextmanager
    async def asked(self, address: str) -> AsyncIterator[Neighbor]:
        """Ask a neighbor inside the block. Errors pass through; those that are its trouble pause it, with one line."""
        self._uses[address] += 1
        try:
            neighbor = self._open.pop(address, None) or Neighbor(address, self._format)
            self._open[address] = neighbor
            yield neighbor
        except (NotFound, WorkerLost):  # it lost blocks, or began anew: that is its right
            raise
        except TwostrokeError as error:
            self._pause(address, error)
            raise
        finally:
            self._uses[address] -= 1
            self._uses += Counter()  # forgets what is not used
            await self._close_idle()

    async def close(self) -> None:
        """Close all connections; none is in use."""
        while self._open:
            await self._open.pop(next(iter(self._open))).close()

    def _pause(self, address: str, error: TwostrokeError) -> None:
        seconds = FOREIGN_SECONDS if isinstance(error, FormatMismatch) else PAUSE_SECONDS
        self.failures += 1
        self._paused[address] = asyncio.get_running_loop().time() + seconds
        log.warning("a peer is left alone", extra={"peer": address, "seconds": seconds, "error": error.message})

    async def _close_idle(self) -> None:
        idle = [address for address in self._open if not self._uses[address]]
        surplus = [self._open.pop(address) for address in idle[: max(0, len(self._open) - self._most)]]
        for neighbor in surplus:  # nobody else finds them any more
            await neighbor.close()
