"""Blocks that decode fills go to the store behind the steps, so that the next turn finds them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from twostroke.engine.outputs import FilledBlock
from twostroke.errors import TwostrokeError
from twostroke.kv.refs import Terms
from twostroke.worker.worker import Worker

log = logging.getLogger(__name__)
WRITE_SECONDS = 10.0


class Publisher:
    """One queue and one task. What does not fit is given back at once: publishing is a favour, tokens are not."""

    def __init__(self, worker: Worker, limit: int) -> None:
        self._worker = worker
        self._limit = limit
        self._waiting: dict[Terms, list[FilledBlock]] = {}
        self._held = 0  # waiting, and being written
        self._wake = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def running(cls, worker: Worker, limit: int) -> AsyncIterator[Publisher]:
        """Publish for as long as the block lasts."""
        publisher = cls(worker, limit)
        task = asyncio.create_task(publisher._run(), name="publisher")
        try:
            yield publisher
        finally:
            task.cancel()
            await asyncio.wait({task})
            for blocks in publisher._waiting.values():
                publisher._give_back(blocks)

    def offer(self, blocks: Sequence[FilledBlock], terms: Terms) -> None:
        """Take over lent blocks, to be published on these terms and given back."""
        room = max(0, self._limit - self._held)
        self._held += len(blocks)
        self._give_back(blocks[room:])
        if blocks[:room]:
            self._waiting.setdefault(terms, []).extend(blocks[:room])
            self._wake.set()

    def _give_back(self, blocks: Sequence[FilledBlock]) -> None:
        self._held -= len(blocks)
        self._worker.engine.release_pages([block.page for block in blocks])

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                terms = next(iter(self._waiting))
                blocks = self._waiting.pop(terms)
                try:
                    await self._publish(blocks, terms)
                except Exception:  # a defect must not stop what comes after, nor keep pages
                    log.exception("publishing failed", extra={"blocks": len(blocks)})
                finally:
                    self._give_back(blocks)

    async def _publish(self, blocks: Sequence[FilledBlock], terms: Terms) -> None:
        deadline = asyncio.get_running_loop().time() + WRITE_SECONDS
        named = [(block.key, block.tokens) for block in blocks]
        try:
            written = await self._worker.store.write_blocks(
                None, named, [block.page for block in blocks], terms, deadline=deadline
            )
            self._worker.store.release(written.lease)
        except TwostrokeError as error:
            log.warning("publishing failed", extra={"reason": error.reason, "blocks": len(blocks)})
