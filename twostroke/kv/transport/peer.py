"""Peers: how a node gets blocks that another host's node holds, whatever they travel over.

Control stays in gRPC: the reading node acquires blocks at the source, which leases them, says where they lie and signs
the lease; a `PeerTransport` moves the bytes straight into slots of the reader's arena; then the lease is released. What
a source offers is a list of kinds with an address each; readers take the first that works.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from twostroke.errors import Overloaded, TwostrokeError, Unavailable, WorkerLost
from twostroke.kv.refs import BlockSlot, Lease, Offer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease at the source, and the source's own proof of it."""

    lease: Lease
    namespace: str
    proof: bytes


@dataclass(frozen=True, slots=True)
class Seal:
    """What a block's header says beside its name."""

    tokens: int
    checksum: int  # xxh3-64 of the block bytes, as verified


@dataclass(frozen=True, slots=True)
class Pulled:
    """The leading blocks that came whole, and why not more.

    Without an error and with fewer blocks than were asked for, the source no longer holds the next one: a miss.
    """

    blocks: tuple[Seal, ...]
    error: TwostrokeError | None = None


class PeerTransport(Protocol):
    """Reads blocks from one source over what it offered; whatever has to be registered there, it has registered."""

    async def read(
        self, grant: Grant, blocks: Sequence[BlockSlot], into: Sequence[memoryview], deadline: float | None
    ) -> Pulled:
        """Fill writable memory, `into[i]` with the bytes of `blocks[i]`, under a lease that keeps them at the source.

        Several reads may be open at once. The memory is the caller's again when this returns or is cancelled; beyond
        the blocks that came whole it may hold anything.

        Args:
            grant: what `Acquire` answered.
            blocks: of the lease, as many as an `Acquire` takes at most.
            into: a block's bytes each.
            deadline: on the loop's clock.

        Raises: nothing but cancellation.
        """

    async def close(self) -> None:
        """Release what is held here and at the source; no read is open."""


Opener = Callable[[Offer], PeerTransport]  # for offers of one kind; raises Unavailable where that cannot work here


class Peers:
    """The transports to all peers, and which of them have just failed.

    One that fails is left alone for a while, so that a peer's trouble costs each reader one try in that time and not
    one for every prompt. Belongs to one event loop.

    Args:
        openers: how offers of a kind are taken, by kind; others are passed over.
        pause_seconds: how long a failing offer is left alone.
        most: transports that are kept open; beyond that the one that was used least recently is closed.
        clock: seconds that never run backwards.
    """

    def __init__(
        self,
        openers: Mapping[str, Opener],
        *,
        pause_seconds: float = 2.0,
        most: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.moved: Counter[str] = Counter()  # blocks that came, by kind of offer
        self._openers = openers
        self._pause_seconds = pause_seconds
        self._most = most
        self._clock = clock
        self._open: dict[Offer, PeerTransport] = {}  # least recently used first
        self._reads: Counter[Offer] = Counter()  # under way
        self._paused: dict[Offer, float] = {}  # until when

    def pick(self, offers: Sequence[Offer]) -> tuple[Offer, ...]:
        """Those that can be taken here and have not just failed, in the order given."""
        now = self._clock()
        self._paused = {offer: until for offer, until in self._paused.items() if until > now}
        return tuple(offer for offer in offers if offer.kind in self._openers and offer not in self._paused)

    async def read(
        self,
        offers: Sequence[Offer],
        grant: Grant,
        blocks: Sequence[BlockSlot],
        into: Sequence[memoryview],
        deadline: float | None,
    ) -> Pulled:
        """As `PeerTransport.read`, over the first offer that works; where one fails, the next goes on behind it."""
        whole: tuple[Seal, ...] = ()
        failure: TwostrokeError = Unavailable("there is no way to the peer at present")
        for offer in self.pick(offers):
            pulled = await self._read(offer, grant, blocks[len(whole) :], into[len(whole) :], deadline)
            whole += pulled.blocks
            self.moved[offer.kind] += len(pulled.blocks)
            if pulled.error is None or not _is_trouble(pulled.error):
                return Pulled(whole, pulled.error)
            failure = pulled.error
            self._paused[offer] = self._clock() + self._pause_seconds
            log.warning("a way to a peer fails", extra={"transport": offer.kind, "error": failure.message})
        return Pulled(whole, failure)

    async def close(self) -> None:
        """Close all transports; no read is open."""
        while self._open:
            await self._open.pop(next(iter(self._open))).close()

    async def _read(
        self,
        offer: Offer,
        grant: Grant,
        blocks: Sequence[BlockSlot],
        into: Sequence[memoryview],
        deadline: float | None,
    ) -> Pulled:
        self._reads[offer] += 1
        try:
            transport = self._open.pop(offer, None) or self._openers[offer.kind](offer)
            self._open[offer] = transport
            await self._close_idle()
            return await transport.read(grant, blocks, into, deadline)
        except Unavailable as error:
            return Pulled((), error)
        finally:
            self._reads[offer] -= 1
            self._reads += Counter()  # forgets what is not read from

    async def _close_idle(self) -> None:
        idle = [offer for offer in self._open if not self._reads[offer]]
        surplus = [self._open.pop(offer) for offer in idle[: max(0, len(self._open) - self._most)]]
        for transport in surplus:  # nobody else finds them any more
            await transport.close()


def _is_trouble(error: TwostrokeError) -> bool:
    """Whether the way failed, and not the blocks, their lease or the request's time."""
    return isinstance(error, Unavailable | Overloaded) and not isinstance(error, WorkerLost)
