"""Disk tiers in temporary folders, and blocks whose right bytes follow from their keys."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.stores import KV_FORMAT, Clock
from twostroke.kv.format import KvFormat
from twostroke.kv.tiers import folders
from twostroke.kv.tiers.disk import DiskLimits, DiskTier
from twostroke.kv.tiers.header import HEADER_BYTES
from twostroke.kv.tiers.slots import ALIGNMENT

BLOCK_BYTES = KV_FORMAT.block_bytes  # 4,096
LARGE = dataclasses.replace(KV_FORMAT, layers=1_024)  # blocks of 4 MiB
RETRY_SECONDS = 30.0


def room(slots: int, kv_format: KvFormat = KV_FORMAT) -> int:
    """Bytes that hold exactly so many blocks."""
    return slots * (kv_format.block_bytes + HEADER_BYTES) + ALIGNMENT


def disk(
    directory: Path,
    slots: int = 4,
    kv_format: KvFormat = KV_FORMAT,
    *,
    total_bytes: int = 1 << 40,
    clock: Callable[[], float] | None = None,
) -> DiskTier:
    """A tier that is not open yet."""
    limits = DiskLimits(bytes=room(slots, kv_format), total_bytes=total_bytes, retry_seconds=RETRY_SECONDS)
    return DiskTier(directory, kv_format, limits, clock=clock or Clock())


@contextmanager
def opened(
    directory: Path,
    slots: int = 4,
    kv_format: KvFormat = KV_FORMAT,
    *,
    total_bytes: int = 1 << 40,
    clock: Callable[[], float] | None = None,
) -> Iterator[DiskTier]:
    """An open tier."""
    tier = disk(directory, slots, kv_format, total_bytes=total_bytes, clock=clock)
    tier.open()
    try:
        yield tier
    finally:
        tier.close()


def content(key: bytes, size: int = BLOCK_BYTES) -> bytes:
    """The only right bytes of a block: no piece of 64 is in any other's."""
    return hashlib.blake2b(key).digest() * (size // 64)


def tokens_of(key: bytes) -> int:
    """The only right number of tokens."""
    return 1 + key[0] % 16


def yes(checksum: int) -> bool:
    """The source did not change."""
    return True


def put(tier: DiskTier, key: bytes, size: int = BLOCK_BYTES, *, intact: Callable[[int], bool] = yes) -> bool:
    """Write the right bytes."""
    return tier.write(key, tokens_of(key), memoryview(content(key, size)), intact)


def got(tier: DiskTier, key: bytes, size: int = BLOCK_BYTES) -> bool:
    """Whether a block could be read; it must be the right one then."""
    into = bytearray(size)
    tokens = tier.read(key, memoryview(into))
    assert tokens is None or (tokens, bytes(into)) == (tokens_of(key), content(key, size))
    return tokens is not None


def flip(tier: DiskTier, name: str, offset: int, mask: int = 1) -> None:
    """Change a byte on disk."""
    with (tier.folder / name).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def folder_bytes(folder: Path) -> int:
    """The sizes of a folder's files."""
    return sum((folder / name).stat().st_size for name in (folders.LOCK, folders.HEADERS, folders.BLOCKS))


@contextmanager
def descriptor_replaced(descriptor: int, path: str) -> Iterator[None]:
    """Let an open descriptor lead to another file: /dev/full has no room, /proc/self/mem answers EIO at its start.

    Its owner may close it inside the block.
    """
    kept, other = os.dup(descriptor), os.open(path, os.O_RDWR)
    try:
        os.dup2(other, descriptor, inheritable=False)
        yield
        with contextlib.suppress(OSError):
            if os.path.sameopenfile(other, descriptor):
                os.dup2(kept, descriptor, inheritable=False)
    finally:
        os.close(other)
        os.close(kept)


def write_until_killed(directory: str, first: str) -> None:
    """Write one large block after the other, and say so after each."""
    tier = disk(Path(directory), 3, LARGE)
    tier.open()
    for name in itertools.count(int(first)):
        put(tier, name.to_bytes(16, "little"), LARGE.block_bytes)
        sys.stdout.write("\n")
        sys.stdout.flush()
