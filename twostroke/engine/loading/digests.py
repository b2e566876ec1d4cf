"""Which values a model has: the digest of its files, and how it is found again without reading them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from hashlib import blake2b
from pathlib import Path

from twostroke.engine.config import DIGEST_BYTES, ModelConfig
from twostroke.errors import ModelError

_CHUNK_BYTES = 1 << 22
_SUFFIX = ".digest"


def weights_digest(config: ModelConfig, files: Iterable[Path]) -> bytes:
    """16 bytes of BLAKE2b over all bytes of `files`, in order, and the arithmetic of `config`."""
    digest = blake2b(config.arithmetic_digest, digest_size=DIGEST_BYTES, person=b"twostroke.weight")
    for path in files:
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class FileState:
    """What the file system says of a file. No program can set `changed_ns`: it moves with every write and rename."""

    path: str  # resolved
    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """Ask the file system; raises OSError."""
        found = path.stat()
        return cls(str(path.resolve()), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def states(files: Iterable[Path]) -> tuple[FileState, ...]:
    """Return the state of each file; raises ModelError when one is not there."""
    try:
        return tuple(map(FileState.of, files))
    except OSError as error:
        raise ModelError(f"there is no model at {error.filename}") from error


class DigestIndex:
    """Remembers the digest of files by their state, one small file an entry.

    A digest is found again only for the same path, device, inode, size, time of modification and time of change, and
    the same arithmetic. Whoever changes a file moves its time of change, whatever else they restore. Two changes within
    one tick of the file system's clock look alike, so nothing is remembered of files that changed less than
    `settle_seconds` ago. An entry carries a check of itself; a damaged one counts as none.
    """

    def __init__(self, folder: Path, *, settle_seconds: float, max_entries: int = 1_024) -> None:
        self._folder, self._settle_seconds, self._max_entries = folder, settle_seconds, max_entries

    def digest(self, config: ModelConfig, files: Sequence[Path]) -> bytes:
        """Return `weights_digest`, reading the files only when their states are new."""
        found = states(files)
        known = self._find(_key(config, found))
        if known is not None:
            return known
        digest = weights_digest(config, files)
        if states(files) == found:
            self._remember(_key(config, found), found, digest)
        return digest

    def _find(self, key: bytes) -> bytes | None:
        try:
            entry = (self._folder / f"{key.hex()}{_SUFFIX}").read_bytes()
        except OSError:
            return None  # as good as an entry that was never made: the caller reads the files instead
        return entry[:DIGEST_BYTES] if entry == _entry(key, entry[:DIGEST_BYTES]) else None

    def _remember(self, key: bytes, files: tuple[FileState, ...], digest: bytes) -> None:
        latest = max(max(each.modified_ns, each.changed_ns) for each in files)
        if time.time_ns() - latest < self._settle_seconds * 1e9:
            return
        with contextlib.suppress(OSError):  # costs the next start a moment; a cache without room says so elsewhere
            (self._folder / f"{key.hex()}{_SUFFIX}").write_bytes(_entry(key, digest))
            for old in self._oldest_first()[: -self._max_entries]:
                old.unlink(missing_ok=True)

    def _oldest_first(self) -> list[Path]:
        return sorted(self._folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)


def _key(config: ModelConfig, files: Iterable[FileState]) -> bytes:
    key = blake2b(config.arithmetic_digest, digest_size=DIGEST_BYTES, person=b"twostroke.states")
    for state in files:
        key.update(repr(astuple(state)).encode() + b"\n")
    return key.digest()


def _entry(key: bytes, digest: bytes) -> bytes:
    return digest + blake2b(key + digest, digest_size=DIGEST_BYTES).digest()
