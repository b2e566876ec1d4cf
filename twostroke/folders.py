"""Where files are kept that can be made again: compiled kernels, prepared weights."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

CACHE_VARIABLE = "TWOSTROKE_CACHE"
_ROOT = 0  # may have laid files out for everybody, in an image for example


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return TWOSTROKE_CACHE, else XDG_CACHE_HOME/twostroke, else ~/.cache/twostroke."""
    if named := environ.get(CACHE_VARIABLE):
        return Path(named)
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twostroke"


def make_private(folder: Path) -> None:
    """Make a folder for this user alone, unless it is there.

    Raises:
        PermissionError: it belongs to another user than this one or root, or others can write to it.
        OSError: it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if found.st_uid not in (_ROOT, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} can be written to by others")


def sync_folder(folder: Path) -> None:
    """Bring the names of a folder's files to the disk; raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
