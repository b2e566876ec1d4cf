"""The folder of prepared files: who may open one, who makes one, and which go when there are too many."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from twostroke.engine.config import ModelConfig
from twostroke.engine.loading.digests import DigestIndex
from twostroke.engine.loading.draft import Draft
from twostroke.engine.loading.prepared import Damaged, PreparedFile
from twostroke.folders import make_private
from twostroke.kv.filelock import remove_if_free

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.05  # flock knows no time limit, so waiting is asking again
_DRAFT = ".draft"
_PREPARED = "*.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsCache:
    """Prepared files in one folder, shared by all workers of a host.

    A draft is the lock on its making: `NAME.draft`, locked by the one who writes it and renamed to NAME when done.
    Others wait for that, at most `wait_seconds`, and then load by themselves. A draft that nobody holds is a leftover
    of a crash: whoever comes next writes it anew.

    Attributes:
        folder: made if need be; not used when others may write to it.
        max_bytes: of all prepared files together; the ones unused for longest go first, those in use never.
        wait_seconds: how long to wait for another process that prepares the same weights.
        settle_seconds: files that changed less than this ago are read again at each start.
    """

    folder: Path
    max_bytes: int = 20 << 30
    wait_seconds: float = 300.0
    settle_seconds: float = 2.0

    def is_usable(self) -> bool:
        """Make the folder; False, and a log line that says why, when it cannot be trusted or made."""
        try:
            make_private(self.folder)
        except OSError as error:
            self._without(error)
            return False
        return True

    def digest(self, config: ModelConfig, files: Sequence[Path]) -> bytes:
        """Return the `weights_digest` of `files`, read only when their states are new."""
        return DigestIndex(self.folder, settle_seconds=self.settle_seconds).digest(config, files)

    def claim(self, name: str, *, size: int, header_bytes: int) -> PreparedFile | Draft | None:
        """Open a prepared file, or become the one who makes it.

        Args:
            name: of the file.
            size: how many bytes it would take at most.
            header_bytes: how many of them its header would take at most.

        Returns: None when neither can be had; the log says why.
        """
        give_up_at = time.monotonic() + self.wait_seconds
        try:
            while True:
                if (claimed := self._open(name) or self._draft(name, size, header_bytes)) is not None:
                    return claimed
                if time.monotonic() >= give_up_at:
                    raise TimeoutError("another process takes too long to prepare them")
                time.sleep(_POLL_SECONDS)
        except OSError as error:
            self._without(error)
            return None

    def _without(self, error: OSError) -> None:
        _log.warning("weights are loaded without a cache", extra={"folder": str(self.folder), "why": str(error)})

    def _open(self, name: str) -> PreparedFile | None:
        """Open a file that is there, sound and free to be read."""
        path = self.folder / name
        try:
            opened = PreparedFile(path)
        except (FileNotFoundError, BlockingIOError):
            return None
        except Damaged as damage:
            _log.warning("prepared weights are damaged and made anew", extra={"file": name, "why": str(damage)})
            path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):  # the time of last use; a folder that is only read keeps none
            os.utime(path)
        return opened

    def _draft(self, name: str, size: int, header_bytes: int) -> Draft | None:
        """Become the writer of a file; None when another is, or has just finished."""
        path = self.folder / f"{name}{_DRAFT}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with ExitStack() as undo:
            undo.callback(os.close, descriptor)
            if not _lock(path, descriptor):
                return None
            undo.callback(path.unlink)
            if (self.folder / name).exists():
                return None
            self._make_room(size + header_bytes)
            os.truncate(descriptor, 0)
            undo.pop_all()
            return Draft(path, descriptor, header_bytes=header_bytes)

    def _make_room(self, size: int) -> None:
        """Remove leftovers, then what was unused for longest, until `size` bytes fit; raises OSError if they cannot."""
        for leftover in self.folder.glob(f"*{_DRAFT}"):
            remove_if_free(leftover)
        kept = sorted(_ages_and_sizes(self.folder.glob(_PREPARED)))
        excess = sum(each for _, each, _ in kept) + size - self.max_bytes
        for _, freed, path in kept:
            if excess > 0 and remove_if_free(path):
                excess -= freed
        if excess > 0:
            raise OSError(f"{size} bytes more would exceed the limit of {self.max_bytes}")


def _ages_and_sizes(paths: Iterable[Path]) -> Iterator[tuple[int, int, Path]]:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # removed by another worker meanwhile
            found = path.stat()
            yield found.st_mtime_ns, found.st_size, path


def _lock(path: Path, descriptor: int) -> bool:
    """Lock the draft at `path`; False when it is locked, or was renamed or swept away before it was."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except (BlockingIOError, FileNotFoundError):
        return False
