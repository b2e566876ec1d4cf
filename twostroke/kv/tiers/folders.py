"""Folders of the disk tier: one a block format, named by the format's digest, used by one process at a time.

    DIRECTORY/<32 hex digits>/lock      held locked by the process that uses the folder
                              headers   HEADER_BYTES a slot
                              blocks    the slots

Files that the tier did not make are never removed, nor is a folder that somebody uses.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Iterator
from pathlib import Path

from twostroke.folders import make_private
from twostroke.kv.filelock import remove_if_free, try_hold

log = logging.getLogger(__name__)

LOCK, HEADERS, BLOCKS = "lock", "headers", "blocks"
_NAME = re.compile(r"[0-9a-f]{32}")
_BLOCK_BYTES = 512  # the unit of st_blocks, on every file system


def claim(folder: Path) -> int:
    """Make a folder if it is missing, and lock it for as long as the answered descriptor is open.

    Raises: BlockingIOError, while another process uses it; OSError.
    """
    make_private(folder)
    descriptor = try_hold(folder / LOCK)
    if descriptor is None:
        raise BlockingIOError(errno.EWOULDBLOCK, "another store node uses this folder", str(folder))
    return descriptor


def make_room(keep: Path, most: int) -> int:
    """Remove the folders beside `keep`, least recently used first, until they take at most `most` bytes together.

    Returns: the bytes that they still take: more than `most` where the rest is in use.
    """
    others = {folder: status for folder in _formats(keep.parent) if folder != keep and (status := _status(folder))}
    taken = sum(size for _, size in others.values())
    for folder, (_, size) in sorted(others.items(), key=lambda each: each[1]):
        if taken > most and _remove(folder):
            log.info("removed blocks of another format", extra={"folder": str(folder), "bytes": size})
            taken -= size
    return taken


def _formats(directory: Path) -> Iterator[Path]:
    return (path for path in directory.iterdir() if _NAME.fullmatch(path.name) and not path.is_symlink())


def _status(folder: Path) -> tuple[float, int] | None:
    """When a folder was used last, in seconds since the epoch, and what it takes, in bytes; None for no folder of ours.

    A file that cannot be seen, or is removed at this moment, counts as one that is not there.
    """
    found = []
    for name in (LOCK, HEADERS, BLOCKS):
        try:
            found.append((folder / name).lstat())
        except OSError:
            continue
    size = sum(each.st_blocks * _BLOCK_BYTES for each in found)
    return (max(each.st_mtime for each in found), size) if size else None


def _remove(folder: Path) -> bool:
    """Remove a folder that nobody uses; says whether its bytes are free now.

    Whoever claims it in this very moment finds its files without a name, and opens it again.
    """
    try:
        if not remove_if_free(folder / LOCK):
            return False
        for name in (HEADERS, BLOCKS):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:  # another user's, in a directory that several share
        log.info("left a folder alone", extra={"folder": str(folder), "error": error.strerror})
        return False
    try:
        folder.rmdir()
    except OSError as error:  # somebody put something there
        log.info("left a folder without blocks", extra={"folder": str(folder), "error": error.strerror})
    return True
