"""The lease between prefill and decode: renewed until every choice has its blocks, then released."""

from __future__ import annotations

import asyncio
import logging
from typing import Self

from twostroke.errors import TwostrokeError
from twostroke.handoff import Ticket
from twostroke.kv.client import KvStoreClient
from twostroke.kv.refs import Lease

log = logging.getLogger(__name__)


class Tenure:
    """Holds at most one lease for the length of the block. It ends early once all expected choices are admitted."""

    def __init__(self, store: KvStoreClient) -> None:
        self._store = store
        self._lease: Lease | None = None
        self._expected = 0
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._let_go()

    def hold(self, ticket: Ticket | None) -> None:
        """Take over a ticket's lease."""
        if ticket is None:
            return
        before, self._lease = self._lease, ticket.lease
        if self._renewing is not None:
            self._renewing.cancel()
        self._renewing = asyncio.create_task(self._renew(ticket.lease, before), name="lease renewal")

    def expect(self, choices: int) -> None:
        """Say how many choices will be admitted."""
        self._expected = choices

    def admitted(self) -> None:
        """Note that one more choice has its blocks."""
        self._expected -= 1
        if self._expected <= 0 and self._renewing is not None:
            self._renewing.cancel()  # its end releases the lease

    async def _renew(self, lease: Lease, before: Lease | None) -> None:
        try:
            if before is not None:
                await self._store.release(before)
            while True:
                await asyncio.sleep(lease.seconds / 3)
                try:
                    await self._store.renew(lease)
                except TwostrokeError as error:
                    log.warning("lease not renewed", extra={"reason": error.reason})
        finally:
            if self._lease == lease:
                self._lease = None
            await self._store.release(lease)

    async def _let_go(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})
