"""From the store into an engine's pages: the one way blocks come in, for prefill and decode alike."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.errors import TwostrokeError
from twostroke.kv.refs import Lease
from twostroke.worker.worker import Worker

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Leading blocks of a prompt that are in the engine's pages now, unreferenced: nothing but a warm cache."""

    local: int = 0  # were there before
    loaded: int = 0  # came from the store
    lease: Lease | None = None


async def load_prefix(
    worker: Worker, keys: Sequence[bytes], tokens: Sequence[int], lease: Lease | None, *, deadline: float | None
) -> Prefix:
    """Bring the longest stored prefix of `keys` into pages.

    Args:
        worker: whose pages and whose store.
        keys: in prompt order from the first block.
        tokens: how many each block holds.
        lease: joined by every block that is read, and its transient blocks are seen; None opens one when something is
            read.
        deadline: seconds on the loop's clock.

    A store in trouble is a shorter prefix, never an error.
    """
    engine, store = worker.engine, worker.store
    local = await engine.cached_blocks(keys)
    if local == len(keys):
        return Prefix(local=local, lease=lease)
    missing = keys[local:]
    try:
        held = await store.lookup(missing, lease, deadline=deadline)
    except TwostrokeError as error:
        log.warning("store lookup failed; computing instead", extra={"reason": error.reason})
        return Prefix(local=local, lease=lease)
    pages = await engine.take_pages(held)
    if not pages:
        return Prefix(local=local, lease=lease)
    try:
        read = await store.read_blocks(lease, missing[: len(pages)], pages, deadline=deadline)
    except TwostrokeError as error:
        engine.release_pages(pages)
        log.warning("store read failed; computing instead", extra={"reason": error.reason})
        return Prefix(local=local, lease=lease)
    except BaseException:
        engine.release_pages(pages)
        raise
    good = list(zip(pages, missing, tokens[local:], strict=False))[: read.blocks]
    engine.release_pages(pages[read.blocks :])
    try:
        await engine.adopt_pages(good)
    except BaseException:
        if lease is None and read.lease is not None:
            store.release(read.lease)
        raise
    return Prefix(local=local, loaded=read.blocks, lease=read.lease)
