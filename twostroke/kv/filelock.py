"""File locks as signs of life: the kernel frees an flock when its holder ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from twostroke.errors import Unavailable

_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_ATTEMPTS = 8


class LockedFile:
    """A new file that this process holds locked until it closes it or ends."""

    def __init__(self, path: Path) -> None:
        """Create and lock. Raises FileExistsError; Unavailable, when others keep removing the file."""
        self.path = path
        for _ in range(_ATTEMPTS):
            self.descriptor = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
            # Somebody who removes leftovers may have found it before it was locked, and held it for that moment.
            if os.fstat(self.descriptor).st_nlink:
                return
            os.close(self.descriptor)
        raise Unavailable(f"{path} is removed by somebody else as often as it is made")

    def close(self) -> None:
        """Remove the file and free the lock."""
        self.path.unlink(missing_ok=True)
        os.close(self.descriptor)


def try_hold(path: Path) -> int | None:
    """Lock a file, made if it is missing, for as long as the answered descriptor is open; None while others hold it.

    Raises: OSError.
    """
    for _ in range(_ATTEMPTS):
        with contextlib.ExitStack() as opened:
            descriptor = os.open(path, _FLAGS | os.O_CREAT, 0o600)
            opened.callback(os.close, descriptor)
            if not _try_lock(descriptor):
                return None
            if os.fstat(descriptor).st_nlink:  # or it was removed before it was locked
                opened.pop_all()
                return descriptor
    return None


def is_held(path: Path) -> bool:
    """Whether some process holds the lock of this file; False when there is no such file."""
    try:
        descriptor = os.open(path, _FLAGS)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)


def remove_if_free(path: Path) -> bool:
    """Remove a file whose lock nobody holds; says whether it is gone now."""
    try:
        descriptor = os.open(path, _FLAGS)
    except FileNotFoundError:
        return True
    try:
        free = _try_lock(descriptor)
        if free:  # removed under the lock, so that nobody takes the file for theirs in between
            path.unlink(missing_ok=True)
        return free
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
