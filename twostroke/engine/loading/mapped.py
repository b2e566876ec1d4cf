"""Files in memory that processes share, in huge pages where the system has them."""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path

import torch

HUGE_PAGE_BYTES = 1 << 21
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, which the mmap module does not name yet
_SMAPS = Path("/proc/self/smaps")  # proc(5)
_ENOUGH = 7 / 8  # of a file in huge pages: one that is all in small ones is read a third slower


def map_file(descriptor: int, size: int) -> mmap.mmap:
    """Map a file as it is now, asking for huge pages; raises OSError.

    The mapping is private, so that a stray write could never reach the file, and holds a duplicate of the descriptor.
    """
    mapped = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without any
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def in_huge_pages(mapped: mmap.mmap) -> bool:
    """Bring a mapped file into memory; say whether it is read about as fast as a copy in huge pages.

    That takes a file system whose cache has large pages (ext4, xfs and btrfs of late) and a file that was written, or
    read from the disk, in such.
    """
    address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    try:
        mapped.madvise(_POPULATE_READ)
        pages = len(mapped) // HUGE_PAGE_BYTES  # the end of the file cannot be in one
        return pages > 0 and _huge_bytes(address) >= _ENOUGH * pages * HUGE_PAGE_BYTES
    except OSError:  # neither Linux 5.14 nor later
        return False


def _huge_bytes(address: int) -> int:
    """How much of the mapping that begins at `address` is in huge pages."""
    with _SMAPS.open() as lines:
        for line in lines:
            if line.startswith(f"{address:x}-"):
                break
        for line in lines:
            if line.startswith("FilePmdMapped:"):
                return int(line.split()[1]) << 10
    return 0
