"""DiskSlots: the open files of one format's blocks. It raises what the disk raises; `disk` decides what follows.

A block is written in three steps: its slot's header is voided if it had one, then come the bytes, then the new header.
Every process sees its own writes and those of an earlier one in that order, because they go through the page cache,
which outlives any process, killed or not. Only when the machine itself stops may a later step be on disk without an
earlier one, and then the checksum does not match: a miss. So no write is ever synced: what could be lost is a copy of
what can be computed again.

The files are read and written, not mapped: a mapped page that the disk cannot give would kill the process.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path

import xxhash

from twostroke.kv.tiers import folders
from twostroke.kv.tiers.files import OpenFile, TierFile
from twostroke.kv.tiers.header import HEADER_BYTES, NO_HEADER, Header, unpack
from twostroke.kv.tiers.index import SlotIndex

ALIGNMENT = 4_096  # of slots, and the most that a file takes beyond its last byte


class DiskSlots:
    """As many slots as fit into `most` bytes, with what was found in them. Calls come one at a time."""

    def __init__(self, folder: Path, block_bytes: int, most: int, open_file: OpenFile) -> None:
        """Open or make the files in a folder that this process has claimed. Raises OSError."""
        self._block_bytes = block_bytes
        self._stride = -(-block_bytes // ALIGNMENT) * ALIGNMENT
        slots = (most - ALIGNMENT) // (self._stride + HEADER_BYTES)
        if slots < 1:
            raise OSError(errno.ENOSPC, f"{most} bytes have no room for a block of {block_bytes}", str(folder))
        with contextlib.ExitStack() as opened:
            self._blocks = open_file(folder / folders.BLOCKS, slots * self._stride)
            opened.callback(self._blocks.close)
            self._headers = open_file(folder / folders.HEADERS, slots * HEADER_BYTES)
            opened.callback(self._headers.close)
            self.index = SlotIndex(slots, _found(self._headers, slots))
            self._files = opened.pop_all()
        self.damaged = 0

    def read(self, key: bytes, into: memoryview) -> int | None:
        """See Tier. A block that does not match its checksum is dropped. Raises OSError."""
        self._check_size(into)
        found = self.index.find(key)
        if found is None:
            return None
        slot, header = found
        try:
            whole = self._blocks.read(into, slot * self._stride)
        except OSError:
            with contextlib.suppress(OSError):  # or this one block would fail again after each return
                self._void(slot, header)
            raise
        if not whole or xxhash.xxh3_64_intdigest(into) != header.checksum:
            self.damaged += 1
            self._void(slot, header)
            return None
        self.index.touch(slot)
        return header.tokens

    def write(self, key: bytes, tokens: int, data: memoryview, intact: Callable[[int], bool]) -> bool:
        """See Tier. Raises OSError."""
        self._check_size(data)
        if key in self.index:
            return True
        self._require_names()
        slot, leaving = self.index.next_slot()
        if leaving:
            self._void(slot, leaving)
        self._blocks.write(data, slot * self._stride)
        # Copied first and summed after: bytes that change in between do not match, on disk as in `intact`.
        header = Header(key, self.index.serial, xxhash.xxh3_64_intdigest(data), tokens)
        if not intact(header.checksum):
            return False
        self._headers.write(header.pack(slot), slot * HEADER_BYTES)
        self.index.put(slot, header)
        return True

    def close(self) -> None:
        """Close the files. Raises OSError."""
        self._files.close()

    def _void(self, slot: int, header: Header) -> None:
        self.index.drop(header.key)
        self._headers.write(NO_HEADER, slot * HEADER_BYTES)

    def _require_names(self) -> None:
        """Raise FileNotFoundError when the files were removed: what is written there would be lost, and take room."""
        if not (self._headers.has_a_name and self._blocks.has_a_name):
            raise FileNotFoundError(errno.ENOENT, "the files were removed")

    def _check_size(self, block: memoryview) -> None:
        if block.nbytes != self._block_bytes:
            raise ValueError(f"a block has {self._block_bytes} bytes, not {block.nbytes}")


def _found(headers: TierFile, slots: int) -> list[tuple[int, Header]]:
    raw = memoryview(bytearray(slots * HEADER_BYTES))
    headers.read(raw, 0)  # what is missing stays zero, and is no header
    places = ((slot, raw[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES]) for slot in range(slots))
    return [(slot, header) for slot, each in places if (header := unpack(each, slot)) is not None]
