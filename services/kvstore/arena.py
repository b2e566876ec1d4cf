"""Arena: the file of block slots that a node owns and the workers of its host map."""

from __future__ import annotations

import logging
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import xxhash

from twostroke.kv import layout
from twostroke.kv.filelock import LockedFile, is_held, remove_if_free
from twostroke.kv.layout import ArenaLayout, SlotHeader
from twostroke.kv.refs import BlockSlot, Reservation
from twostroke.settings import InvalidSetting

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
_PREFIX, _SUFFIX = "twostroke-", ".arena"
_FILL_BYTES = 1 << 20


class Arena:
    """A mapped arena file. Only its owner writes headers; workers write blocks."""

    def __init__(self, path: Path, incarnation: str, mapped: mmap.mmap) -> None:
        self.path = path
        self.incarnation = incarnation
        self._map = mapped

    def cut(self, block_bytes: int, *, checksums: bool) -> ArenaLayout:
        """Cut the file into slots. Raises InvalidRequest when not even one block fits."""
        return layout.cut(self.path, len(self._map), block_bytes, checksums=checksums)

    def clear(self, plan: ArenaLayout, reservation: Reservation) -> None:
        """Void what the slot held, before a writer learns that it may write there."""
        self._write_header(plan, reservation.slot, SlotHeader(layout.NO_KEY, reservation.generation, 0, None))

    def publish(self, plan: ArenaLayout, place: BlockSlot, checksum: int | None) -> None:
        """Name the block that the slot holds now."""
        block = place.block
        self._write_header(plan, place.slot, SlotHeader(block.key, block.generation, block.tokens, checksum))

    def header(self, plan: ArenaLayout, slot: int) -> SlotHeader:
        """What the slot holds."""
        return plan.read_header(self._map, slot)

    def read(self, plan: ArenaLayout, slot: int, offset: int, count: int) -> bytes:
        """At most `count` bytes of a block from `offset`."""
        start = plan.block_at(slot)
        return self._map[start + offset : start + min(offset + count, plan.block_bytes)]

    def write(self, plan: ArenaLayout, slot: int, offset: int, data: bytes) -> None:
        """Put `data` into a block at `offset`; the caller has checked that it fits."""
        start = plan.block_at(slot) + offset
        self._map[start : start + len(data)] = data

    def checksum(self, plan: ArenaLayout, slot: int) -> int:
        """xxh3-64 of a block."""
        with self.block(plan, slot) as block:
            return xxhash.xxh3_64_intdigest(block)

    @contextmanager
    def block(self, plan: ArenaLayout, slot: int) -> Iterator[memoryview]:
        """The bytes of a block themselves, uint8 [block_bytes], inside the `with`: the arena cannot be closed there."""
        start = plan.block_at(slot)
        with memoryview(self._map) as whole, whole[start : start + plan.block_bytes] as block:
            yield block

    def writer_lives(self, writer: str) -> bool:
        """Whether the writer still holds its lock."""
        return is_held(layout.writer_lock_path(self.path, writer))

    def forget_writer(self, writer: str) -> None:
        """Remove what a writer that is gone left behind."""
        remove_if_free(layout.writer_lock_path(self.path, writer))

    def forget_ended_writers(self) -> None:
        """Remove what all writers that are gone left behind: one that was killed does not do it itself."""
        remove_writer_locks(self.path)

    def _write_header(self, plan: ArenaLayout, slot: int, header: SlotHeader) -> None:
        start = plan.header_at(slot)
        self._map[start : start + plan.header_bytes] = header.pack()


def default_directory() -> Path:
    """Shared memory, or a temporary folder where there is none."""
    if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
        return SHARED_MEMORY
    folder = Path(tempfile.gettempdir())
    log.warning("no shared memory here; the arena lies in a folder", extra={"directory": str(folder)})
    return folder


@contextmanager
def open_arena(directory: Path, incarnation: str, size: int) -> Iterator[Arena]:
    """Make the arena file of a new incarnation; leaving the block removes it.

    Files of nodes that ended without that are removed first: their room may be needed.

    Raises: InvalidSetting, when the directory is missing or has too little room.
    """
    if not directory.is_dir():
        raise InvalidSetting("arena_directory", directory, "is no directory")
    remove_leftovers(directory)
    _require_room(directory, size)
    path = directory / f"{_PREFIX}{incarnation}{_SUFFIX}"
    # The node's own lock as a writer: it fills slots on behalf of workers that cannot map the file.
    with closing(LockedFile(path)) as file, closing(LockedFile(layout.writer_lock_path(path, incarnation))):
        _allocate(file.descriptor, size, directory)
        with mmap.mmap(file.descriptor, size) as mapped:
            page = layout.first_page(incarnation)
            mapped[: len(page)] = page
            try:
                yield Arena(path, incarnation, mapped)
            finally:
                remove_writer_locks(path)


def remove_leftovers(directory: Path) -> None:
    """Remove arenas, and locks of their writers, whose owners have ended without doing it."""
    for path in directory.glob(f"{_PREFIX}*{_SUFFIX}"):
        if _removed(path):
            log.info("removed the arena of a node that is gone", extra={"path": str(path)})
    for path in directory.glob(f"{_PREFIX}*{_SUFFIX}.writer.*"):
        if not path.with_name(path.name.partition(".writer.")[0]).exists():
            _removed(path)


def remove_writer_locks(arena: Path) -> None:
    """Remove the locks of an arena's writers that have ended."""
    for path in arena.parent.glob(f"{arena.name}.writer.*"):
        _removed(path)


def _removed(path: Path) -> bool:
    try:
        return remove_if_free(path)
    except OSError as error:  # another user's file, or no file at all: in a shared folder anyone may put one there
        log.info("left a file alone", extra={"path": str(path), "error": error.strerror})
        return False


def _require_room(directory: Path, size: int) -> None:
    """Refuse before a byte is written: memory that is missing later kills whoever touches the page."""
    if _free_bytes(directory) < size:
        raise InvalidSetting("arena_bytes", size, _no_room(directory, size))


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _no_room(directory: Path, size: int) -> str:
    return (
        f"the arena needs {size >> 20:,} MiB in {directory}, where {_free_bytes(directory) >> 20:,} MiB are free; give "
        "the container more shared memory (docker run --shm-size, compose shm_size), or set a smaller --arena-bytes or "
        "another --arena-directory"
    )


def _allocate(descriptor: int, size: int, directory: Path) -> None:
    """Reserve the bytes now: a sparse file would kill a reader once the file system is full."""
    try:
        if sys.platform != "darwin":
            os.posix_fallocate(descriptor, 0, size)
            return
        os.ftruncate(descriptor, size)
        for offset in range(0, size, _FILL_BYTES):
            os.pwrite(descriptor, bytes(min(_FILL_BYTES, size - offset)), offset)
    except OSError as error:  # somebody else took the room in between
        raise InvalidSetting("arena_bytes", size, f"{_no_room(directory, size)} ({error.strerror})") from error
