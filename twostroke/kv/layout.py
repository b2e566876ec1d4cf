"""How an arena file is laid out, for the node that owns it and the workers that map it.

    0                 page: magic, version, incarnation
    HEADERS_OFFSET    one header of 64 bytes a slot: what the slot holds now
    blocks_offset     the blocks, `block_stride` bytes apart

Only the node writes headers. It raises the generation and clears the key before it gives a slot out again, and writes
the key when the block is complete; a reader copies first and compares key and generation afterwards (the reader's half
of a seqlock), so bytes that changed under the copy are never taken for the block.
"""

from __future__ import annotations

import mmap
import platform
import struct
from dataclasses import dataclass
from pathlib import Path

from twostroke.errors import InvalidRequest
from twostroke.kv.refs import Offer

MAGIC = b"twostroke.arena\x00"
VERSION = 1
PAGE_BYTES = 4_096
HEADERS_OFFSET = PAGE_BYTES
HEADER_BYTES = 64
BLOCK_ALIGNMENT = 64  # a cache line: no two writers share one
NO_KEY = bytes(16)

_PAGE = struct.Struct("<16sI32s")
_HEADER = struct.Struct("<16sQI4xQ24x")  # key, generation, tokens, checksum


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What a slot holds. The key is NO_KEY while it is being written."""

    key: bytes
    generation: int
    tokens: int
    checksum: int | None  # xxh3-64 of the block bytes; None where checksums are off

    def pack(self) -> bytes:
        """The HEADER_BYTES of this header."""
        return _HEADER.pack(self.key, self.generation, self.tokens, self.checksum or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaLayout:
    """Where everything lies; offsets and sizes in bytes."""

    path: Path
    file_bytes: int
    slots: int
    headers_offset: int
    header_bytes: int
    blocks_offset: int
    block_bytes: int
    block_stride: int
    checksums: bool  # readers and writers keep and verify them

    def header_at(self, slot: int) -> int:
        """Offset of a slot's header."""
        return self.headers_offset + slot * self.header_bytes

    def block_at(self, slot: int) -> int:
        """Offset of a slot's block."""
        return self.blocks_offset + slot * self.block_stride

    def read_header(self, arena: mmap.mmap, slot: int) -> SlotHeader:
        """The header of a slot as it is now in the mapped arena."""
        key, generation, tokens, checksum = _HEADER.unpack_from(arena, self.header_at(slot))
        return SlotHeader(key, generation, tokens, checksum if self.checksums else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """What a node tells a worker that introduces itself."""

    incarnation: str
    writer_id: str  # whose introduction this answers; empty for a worker that only looks up
    layout: ArenaLayout
    max_keys: int  # keys in one call
    max_lease_seconds: float
    address: str = ""  # host:port of the node, as other hosts reach it
    offers: tuple[Offer, ...] = ()  # ways in which other hosts' nodes may read blocks, preferred first


def cut(path: Path, file_bytes: int, block_bytes: int, *, checksums: bool) -> ArenaLayout:
    """Cut a file into as many slots as fit. Raises InvalidRequest when not even one does."""
    stride = _aligned(block_bytes, BLOCK_ALIGNMENT)
    slots = (file_bytes - HEADERS_OFFSET - PAGE_BYTES) // (stride + HEADER_BYTES)
    if slots < 1:
        raise InvalidRequest(
            f"a block of {block_bytes} bytes does not fit an arena of {file_bytes} bytes; enlarge the arena",
            field="kv_format",
        )
    return ArenaLayout(
        path=path,
        file_bytes=file_bytes,
        slots=slots,
        headers_offset=HEADERS_OFFSET,
        header_bytes=HEADER_BYTES,
        blocks_offset=_aligned(HEADERS_OFFSET + slots * HEADER_BYTES, PAGE_BYTES),
        block_bytes=block_bytes,
        block_stride=stride,
        checksums=checksums,
    )


def first_page(incarnation: str) -> bytes:
    """The start of an arena file: it says whose it is."""
    return _PAGE.pack(MAGIC, VERSION, incarnation.encode())


def is_arena_of(page: bytes, incarnation: str) -> bool:
    """Whether a file that starts with `page` is the arena of this incarnation, in a layout that we know."""
    return page[: _PAGE.size] == first_page(incarnation)


def writer_lock_path(arena: Path, writer: str) -> Path:
    """The file that a writer keeps locked for as long as it may copy into the arena."""
    return arena.with_name(f"{arena.name}.writer.{writer}")


def has_total_store_order() -> bool:
    """Whether this processor shows stores to others in program order; elsewhere only checksums prove a copy whole."""
    return platform.machine().lower() in ("x86_64", "amd64", "i686")


def _aligned(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
