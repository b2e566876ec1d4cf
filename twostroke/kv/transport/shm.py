"""Shared memory: the worker maps the node's arena and copies; the calls carry names and slots only."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import xxhash

from twostroke.errors import NotFound, Overloaded, TwostrokeError, Unavailable
from twostroke.kv.filelock import LockedFile
from twostroke.kv.layout import PAGE_BYTES, ArenaLayout, Attachment, is_arena_of, writer_lock_path
from twostroke.kv.messages import WrittenBlock
from twostroke.kv.refs import BlockRef, BlockSlot, Reservation
from twostroke.kv.transport import Tenancy
from twostroke.kv.transport.calls import StoreCalls
from twostroke.kv.transport.pages import Pages, Row

log = logging.getLogger(__name__)
T = TypeVar("T")


class MappedArena:
    """The arena as this process sees it. Its methods block for the length of a copy: call them in the copy thread.

    Raises: Unavailable, when the file is not here or not the arena that the node speaks of.
    """

    def __init__(self, node: Attachment) -> None:
        self.layout = node.layout
        try:
            self._lock = LockedFile(writer_lock_path(self.layout.path, node.writer_id))
        except OSError as error:
            raise Unavailable(f"{self.layout.path.parent} cannot be written here: {error.strerror}") from error
        try:
            self._map = _mapped(self.layout, node.incarnation)
        except OSError as error:
            self._lock.close()
            raise Unavailable(f"{self.layout.path} cannot be mapped here: {error.strerror}") from error
        except BaseException:
            self._lock.close()
            raise
        self._bytes: Row = np.frombuffer(self._map, dtype=np.uint8)

    def write(self, reservation: Reservation, row: Row) -> int | None:
        """Copy a page into a reserved slot; answers its checksum where the arena keeps them."""
        slot = self._slot(reservation.slot)
        np.copyto(slot, row)
        return xxhash.xxh3_64_intdigest(slot.data) if self.layout.checksums else None

    def read(self, place: BlockSlot, row: Row) -> bool:
        """Copy a block into a page; answers whether the slot held that very block to the end of the copy."""
        np.copyto(row, self._slot(place.slot))
        header = self.layout.read_header(self._map, place.slot)
        if (header.key, header.generation) != (place.block.key, place.block.generation):
            return False
        return header.checksum is None or header.checksum == xxhash.xxh3_64_intdigest(row.data)

    def close(self) -> None:
        """Unmap the arena and say that this writer copies no more."""
        try:
            del self._bytes
            self._map.close()
        finally:
            self._lock.close()

    def _slot(self, slot: int) -> Row:
        start = self.layout.block_at(slot)
        return self._bytes[start : start + self.layout.block_bytes]


def _mapped(layout: ArenaLayout, incarnation: str) -> mmap.mmap:
    descriptor = os.open(layout.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        page = os.pread(descriptor, PAGE_BYTES, 0)
        if os.fstat(descriptor).st_size != layout.file_bytes or not is_arena_of(page, incarnation):
            raise Unavailable(f"{layout.path} is not the arena that the store speaks of")
        return mmap.mmap(descriptor, layout.file_bytes)
    finally:
        os.close(descriptor)


class SharedMemoryTransport:
    """Copies in one thread of its own, so that the loop goes on; numpy's copies release the interpreter lock.

    When it is not known whether the node took a call, slots may wait in quarantine for this writer. Then the client
    attaches anew under another name, and this transport is closed behind its last transfer: that frees its lock, and
    the node takes the slots back.
    """

    name = "shared memory"

    def __init__(self, calls: StoreCalls, pages: Pages) -> None:
        self._calls = calls
        self._pages = pages
        self._arena = MappedArena(calls.node)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-copy")

    async def write(
        self, tenancy: Tenancy, blocks: Sequence[tuple[bytes, int]], pages: Sequence[int], deadline: float | None
    ) -> list[BlockRef]:
        """See BlockTransport. A call that fails after Reserve gives its slots back."""
        source = {key: (page, tokens) for (key, tokens), page in zip(blocks, pages, strict=True)}
        reservations, held = await self._reserve(tenancy, list(source), deadline)
        refs = [place.block for place in held]
        if not reservations:
            return refs

        def copy() -> list[WrittenBlock]:
            written = []

            def take(index: int, row: Row) -> None:
                each = reservations[index]
                tokens = source[each.key][1]
                written.append(WrittenBlock(each.written(tokens), self._arena.write(each, row)))

            self._pages.read([source[each.key][0] for each in reservations], take)
            return written

        try:
            written = await self._in_thread(copy)
            keys = await self._calls.commit(tenancy, written, deadline)
        except Exception:  # no cancellation: only the end of the loop could bring one, with the copy under way
            await self._abandon(reservations)
            raise
        return refs + [each.place.block for each in written if each.place.block.key in keys]

    async def _reserve(
        self, tenancy: Tenancy, keys: Sequence[bytes], deadline: float | None
    ) -> tuple[Sequence[Reservation], Sequence[BlockSlot]]:
        try:
            return await self._calls.reserve(tenancy, keys, deadline)
        except (NotFound, Overloaded):  # the node said no
            raise
        except TwostrokeError:
            self._calls.client.forget(self._calls.node)
            raise

    async def _abandon(self, reservations: Sequence[Reservation]) -> None:
        """Give slots back whose copies have ended; as a writer that is given up, by the end of this transport."""
        if not self._calls.client.is_attached(self._calls.node):
            return
        try:
            await self._calls.abandon(reservations)
        except TwostrokeError as error:
            log.warning("slots not given back yet", extra={"reason": error.reason, "slots": len(reservations)})
            self._calls.client.forget(self._calls.node)

    async def read(self, tenancy: Tenancy, keys: Sequence[bytes], pages: Sequence[int], deadline: float | None) -> int:
        """See BlockTransport. A block that changed under the copy is a miss, and so is all after it."""
        places = await self._calls.acquire(tenancy, keys, deadline)

        def copy() -> int:
            return self._pages.write(pages[: len(places)], lambda index, row: self._arena.read(places[index], row))

        return await self._in_thread(copy) if places else 0

    async def close(self) -> None:
        """Unmap, behind the last copy."""
        await self._in_thread(self._arena.close)
        self._thread.shutdown()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run work in the copy thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
