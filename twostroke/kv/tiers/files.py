"""The files of the disk tier, and the operations on them that a disk can refuse."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class TierFile:
    """An open file of exactly `size` bytes, which are reserved now: a full file system is found out here.

    Every method but `close` raises OSError; offsets are in bytes.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.descriptor = os.open(path, _FLAGS, 0o600)
        try:
            _reserve(self.descriptor, size)
        except BaseException:
            os.close(self.descriptor)
            raise

    @property
    def has_a_name(self) -> bool:
        """False once it was removed: what is written then would be lost, and take room."""
        return os.fstat(self.descriptor).st_nlink > 0

    def read(self, into: memoryview, offset: int) -> bool:
        """Fill `into`; says whether the file is long enough for that."""
        return os.preadv(self.descriptor, [into], offset) == into.nbytes

    def write(self, data: memoryview | bytes, offset: int) -> None:
        """Write all of `data`."""
        if os.pwrite(self.descriptor, data, offset) != len(data):
            raise OSError(errno.ENOSPC, "only a part was written")

    def close(self) -> None:
        """Free the descriptor, whatever the disk says."""
        os.close(self.descriptor)


OpenFile = Callable[[Path, int], TierFile]


def _reserve(descriptor: int, size: int) -> None:
    before = os.fstat(descriptor).st_size
    if before > size or sys.platform == "darwin":  # which reserves nothing; a full disk is found out by a write there
        os.ftruncate(descriptor, size)
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.ftruncate(descriptor, before)  # others need what little there is
        raise
