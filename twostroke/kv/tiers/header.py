"""The header of a block on disk: whose bytes a slot holds, and what proves them.

A header proves itself (`check`, over everything else and over the place where it lies) and its block (`checksum`). So
whatever part of a write reached the disk, and in whichever order, what is left is a whole block or none.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

HEADER_BYTES = 64  # a divisor of a page: no header lies across two
NO_HEADER = bytes(HEADER_BYTES)

_MAGIC = b"kvdisk/1"
_FIELDS = struct.Struct("<8s16sQQI12x")  # magic, key, serial, checksum, tokens
_CHECK = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Header:
    """One block on disk."""

    key: bytes
    serial: int  # which write into this file it was: larger is later
    checksum: int  # xxh3-64 of the block bytes
    tokens: int

    def pack(self, slot: int) -> bytes:
        """The HEADER_BYTES of this header at its slot."""
        fields = _FIELDS.pack(_MAGIC, self.key, self.serial, self.checksum, self.tokens)
        return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields, seed=slot))


def unpack(raw: memoryview, slot: int) -> Header | None:
    """The header in these HEADER_BYTES; None when there is none, a damaged one, or one that belongs elsewhere."""
    fields = raw[: _FIELDS.size]
    magic, key, serial, checksum, tokens = _FIELDS.unpack(fields)
    if magic != _MAGIC or _CHECK.unpack_from(raw, _FIELDS.size) != (xxhash.xxh3_64_intdigest(fields, seed=slot),):
        return None
    return Header(key, serial, checksum, tokens)
