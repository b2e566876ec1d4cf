"""Spool: the one thread that moves blocks between the arena and the tier below it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from services.kvstore.arena import Arena
from twostroke.kv.layout import ArenaLayout
from twostroke.kv.messages import WrittenBlock
from twostroke.kv.refs import BlockSlot, Reservation
from twostroke.kv.tiers import Tier, TierStats

log = logging.getLogger(__name__)

BURST = 8  # blocks written before a read gets its turn


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolStats:
    """How the tier is, and blocks offered to it since the node began, by what became of them."""

    tier: TierStats
    waiting: int
    written: int
    known: int  # on the tier already
    dropped: int  # the queue was full, or the node ended
    evicted: int  # from the arena, before they were written
    refused: int  # by a tier in trouble, or since the bytes do not match the checksum of their writer


class Spool:
    """Writes committed blocks behind the node's back, and reads blocks back into reserved slots.

    Nothing is pinned: a slot that waits here may be evicted and filled anew. So its header is compared after its bytes
    were copied (the reader's half of a seqlock, see `kv.layout`), and only what was that block all along is kept.

    Every method belongs to the event loop and returns at once; bytes move in the tier's thread.

    Args:
        queue: most blocks that wait; the newest beyond it are dropped.
        clock: seconds that never run backwards.
    """

    def __init__(
        self,
        arena: Arena,
        layout: ArenaLayout,
        tier: Tier,
        *,
        queue: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arena = arena
        self._layout = layout
        self._tier = tier
        self._queue = queue
        self._clock = clock
        self._waiting: deque[BlockSlot] = deque()
        self._burst: asyncio.Future[None] | None = None
        self._closed = False
        self._known = self._dropped = 0  # counted by the loop
        self._written = self._evicted = self._refused = 0  # by the thread
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-tier")
        self._loop = asyncio.get_running_loop()
        self._loop.run_in_executor(self._thread, tier.open)

    def offer(self, places: Iterable[BlockSlot]) -> None:
        """Copy blocks that were committed just now to the tier, some time, if they are still there by then."""
        for place in places:
            if self._tier.holds([place.block.key]):
                self._known += 1
            elif self._closed or len(self._waiting) >= self._queue:
                self._dropped += 1
            else:
                self._waiting.append(place)
        self._go_on()

    def holds(self, keys: Iterable[bytes]) -> int:
        """How many leading keys the tier holds, most likely."""
        return self._tier.holds(keys)

    def fetch(self, reservations: Sequence[Reservation], seconds: float) -> asyncio.Future[list[WrittenBlock]]:
        """Fill reserved slots from the tier, in order, up to the first block that it lost or until time is up.

        It goes before blocks that wait to be written, and behind what was fetched before.

        Returns: those that are whole, to be committed; the other slots are to be abandoned. Until the future is done
            the slots are being written to: shield it, and settle them when it is done, not when its caller is.
        """
        until = self._clock() + seconds
        return self._loop.run_in_executor(self._thread, self._read, reservations, until)

    async def idle(self) -> None:
        """Return once nothing waits."""
        while self._burst is not None:
            await asyncio.wait({self._burst})

    def stats(self) -> SpoolStats:
        """Count."""
        return SpoolStats(
            tier=self._tier.stats(),
            waiting=len(self._waiting),
            written=self._written,
            known=self._known,
            dropped=self._dropped,
            evicted=self._evicted,
            refused=self._refused,
        )

    async def close(self, seconds: float) -> None:
        """Write what waits, for at most so long, and close the tier; what is left then is dropped. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.idle()
        self._dropped += len(self._waiting)
        self._waiting.clear()  # a burst under way ends with its block
        closing = self._loop.run_in_executor(self._thread, self._tier.close)
        self._thread.shutdown(wait=False)
        if (await asyncio.wait({closing}, timeout=seconds))[1]:
            log.warning("the tier does not answer; it is left to end by itself", extra={"seconds": seconds})

    def _go_on(self) -> None:
        if self._waiting and self._burst is None:
            self._burst = self._loop.run_in_executor(self._thread, self._write_burst)
            self._burst.add_done_callback(self._ended)

    def _ended(self, burst: asyncio.Future[None]) -> None:
        self._burst = None
        if not burst.cancelled() and burst.exception() is not None:  # a defect must not cost more than its block
            log.error("a block was not written", exc_info=burst.exception())
        self._go_on()

    def _write_burst(self) -> None:
        for _ in range(BURST):
            try:
                place = self._waiting.popleft()
            except IndexError:
                return
            self._write(place)

    def _write(self, place: BlockSlot) -> None:
        block = place.block
        if not self._is_there(place):
            self._evicted += 1
            return

        def intact(checksum: int) -> bool:
            return self._is_there(place, checksum)

        with self._arena.block(self._layout, place.slot) as data:
            written = self._tier.write(block.key, block.tokens, data, intact)
        if written:
            self._written += 1
        elif self._is_there(place):
            self._refused += 1
        else:
            self._evicted += 1

    def _is_there(self, place: BlockSlot, checksum: int | None = None) -> bool:
        """Whether the slot holds the block; with a checksum, whether it is the one that the writer gave, if any."""
        header = self._arena.header(self._layout, place.slot)
        if (header.key, header.generation) != (place.block.key, place.block.generation):
            return False
        return checksum is None or header.checksum is None or header.checksum == checksum

    def _read(self, reservations: Sequence[Reservation], until: float) -> list[WrittenBlock]:
        whole: list[WrittenBlock] = []
        for each in reservations:
            if self._clock() >= until:
                break
            with self._arena.block(self._layout, each.slot) as into:
                tokens = self._tier.read(each.key, into)
            if tokens is None:
                break
            checksum = self._arena.checksum(self._layout, each.slot) if self._layout.checksums else None
            whole.append(WrittenBlock(each.written(tokens), checksum))
        return whole
