"""From the store into an engine's pages: the one way blocks come in, for prefill and decode alike.

Orders that need the same blocks at the same time get them by one transfer. It is a task of its own: an order that
leaves does not end it, since others may wait for it, and what is on its way will be found by the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from twostroke.errors import TwostrokeError
from twostroke.kv.blocks import Loaded
from twostroke.kv.refs import Lease, Terms
from twostroke.rpc.deadline import remaining
from twostroke.worker.worker import Worker

log = logging.getLogger(__name__)

LOOKS = 3  # at the store: more than one only behind a transfer of another order that did not bring all
JOIN_SECONDS = 60.0  # for a transfer by another order; its own calls have shorter limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Leading blocks of a prompt that are in the engine's pages now, unreferenced: nothing but a warm cache."""

    local: int = 0  # were there before
    joined: int = 0  # came by transfers of other orders meanwhile
    loaded: int = 0  # came from the store by a transfer of this order
    lease: Lease

    @property
    def blocks(self) -> int:
        """All of them."""
        return self.local + self.stored

    @property
    def stored(self) -> int:
        """Those that came from the store."""
        return self.joined + self.loaded


async def load_prefix(
    worker: Worker,
    keys: Sequence[bytes],
    tokens: Sequence[int],
    lease: Lease,
    terms: Terms,
    *,
    deadline: float | None,
) -> Prefix:
    """Bring the longest stored prefix of `keys` into pages.

    Args:
        worker: whose pages and whose store.
        keys: in prompt order from the first block.
        tokens: how many each block holds.
        lease: joined by every block that this order reads, and its transient blocks are seen; opened when something is
            read, where it is not open yet. One at another host's node is where our node gets blocks that it lacks.
        terms: of the request, as the store takes them.
        deadline: seconds on the loop's clock.

    A store in trouble is a shorter prefix, never an error.
    """
    prefix = Prefix(local=await worker.engine.cached_blocks(keys), lease=lease)
    for _ in range(LOOKS):
        here = prefix.blocks
        if here == len(keys):
            break
        try:
            # Asking for what is on its way is of no use; and while we ask, another order may have begun.
            held = 0 if keys[here] in worker.loads else await _held(worker, keys[here:], lease, deadline)
            if keys[here] not in worker.loads:
                missing = _Missing(keys[:here], keys[here : here + held], tokens[here:], terms)
                return await _loaded(worker, missing, prefix, deadline) if held else prefix
            await worker.loads.ended(keys[here : here + 1], at_most=remaining(deadline, at_most=JOIN_SECONDS))
        except TwostrokeError as error:
            log.warning("the store did not answer; computing instead", extra={"reason": error.reason})
            break
        prefix = replace(prefix, joined=max(0, await worker.engine.cached_blocks(keys) - prefix.local))
    return prefix


async def _held(worker: Worker, keys: Sequence[bytes], lease: Lease, deadline: float | None) -> int:
    """How many leading keys our node can bring: all, where they were named together with the lease that keeps them."""
    if lease.opened:
        return len(keys)
    return await worker.store.lookup(keys, lease, anywhere=True, deadline=deadline)


@dataclass(frozen=True, slots=True)
class _Missing:
    """Blocks to be read, and those before them."""

    head: Sequence[bytes]
    keys: Sequence[bytes]
    tokens: Sequence[int]
    terms: Terms


async def _loaded(worker: Worker, missing: _Missing, prefix: Prefix, deadline: float | None) -> Prefix:
    """The prefix with what is read now: under its lease, or, from another node, under one until the pages hold it."""
    if not worker.store.is_elsewhere(prefix.lease):
        read = await _load(worker, missing, prefix.lease, None, deadline)
        return replace(prefix, loaded=read.blocks, lease=read.lease)
    read = await _load(worker, missing, worker.store.new_lease(), prefix.lease, deadline)
    worker.store.release(read.lease)
    return replace(prefix, loaded=read.blocks)


async def _load(
    worker: Worker, missing: _Missing, lease: Lease, source: Lease | None, deadline: float | None
) -> Loaded:
    """Begin a transfer and wait for it. A lease that it opens for a caller who has left is released."""
    transfer = worker.loads.begin(missing.keys, _transfer(worker, missing, lease, source, deadline))
    try:
        return await asyncio.shield(transfer)
    except asyncio.CancelledError:
        if not lease.opened:
            transfer.add_done_callback(lambda _: worker.store.release(lease))
        raise


async def _transfer(
    worker: Worker, missing: _Missing, lease: Lease, source: Lease | None, deadline: float | None
) -> Loaded:
    """Read blocks that the store holds into pages, as far as there is room, and give these to the prefix cache."""
    engine, store, keys = worker.engine, worker.store, missing.keys
    pages = await engine.take_pages(len(keys), behind=missing.head)
    if not pages:
        return Loaded(lease, 0)
    try:
        wanted = keys[: len(pages)]
        read = await store.read_blocks(lease, wanted, pages, missing.terms, source=source, deadline=deadline)
    except TwostrokeError as error:
        engine.release_pages(pages)
        log.warning("store read failed; computing instead", extra={"reason": error.reason})
        return Loaded(lease, 0)
    except BaseException:
        engine.release_pages(pages)
        raise
    engine.release_pages(pages[read.blocks :])
    try:
        await engine.adopt_pages(list(zip(pages, keys, missing.tokens, strict=False))[: read.blocks])
    except BaseException:
        if not lease.opened:
            store.release(read.lease)
        raise
    return read
