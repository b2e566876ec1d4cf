"""Leases between prefill and decode: renewed until every choice has its blocks, then released."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Self

from services.router.stores import Stores
from twostroke.errors import NotFound, TwostrokeError
from twostroke.handoff import Ticket
from twostroke.kv.refs import Lease

log = logging.getLogger(__name__)


class Tenure:
    """Holds the leases of one request's tickets, at most for the length of the block.

    They end early once all expected choices are admitted. Each lease has a task that ends by releasing it: that task is
    told, never cancelled, since a task that is cancelled before its first step would release nothing. `on_ended` is
    called when a lease turns out to have ended by itself.
    """

    def __init__(self, stores: Stores, on_ended: Callable[[], None]) -> None:
        self._stores = stores
        self._on_ended = on_ended
        self._expected: set[int] = set()
        self._over = asyncio.Event()
        self._holding: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        if self._holding:
            await asyncio.wait(self._holding)

    def hold(self, ticket: Ticket | None) -> None:
        """Take over a ticket's lease."""
        if ticket is not None:
            self._over.clear()  # a ticket of a second prefill may come after the first one's choices were admitted
            self._holding.add(asyncio.create_task(self._keep(ticket.lease), name="lease"))

    def expect(self, choices: Iterable[int]) -> None:
        """Say which choices will be admitted."""
        self._expected = set(choices)

    def admitted(self, choice: int) -> None:
        """Note that a choice has its blocks; one that is tried again counts once."""
        self._expected.discard(choice)
        if not self._expected:
            self._over.set()

    async def _keep(self, lease: Lease) -> None:
        while not self._over.is_set():
            try:
                async with asyncio.timeout(lease.seconds / 3):
                    await self._over.wait()
            except TimeoutError:
                await self._renew(lease)
        self._stores.release(lease)

    async def _renew(self, lease: Lease) -> None:
        try:
            await self._stores.renew(lease)
        except TwostrokeError as error:
            log.warning("lease not renewed", extra={"reason": error.reason})
            if isinstance(error, NotFound):
                self._on_ended()
