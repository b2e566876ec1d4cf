"""Prepared files: the parts of a model as a mode stores them, mapped and shared by all workers of a host.

A prepared file is a safetensors file that any reader of that format can open. Its header lists the parts under the
names they were asked for, and in `__metadata__` what the file is, an XXH3 checksum of each part, and one of the header.

What is detected: another layout, another model or mode under this name, a file cut short or grown, any damage to the
header, and damage to a part at the moment it is taken, which reads it once (at 10 GB/s and more). What is not: damage
done later to pages that are read from the disk again, and files forged together with their checksums, which is why the
folder must not be writable by others.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor

from twostroke.engine.loading.checkpoint import Checkpoint
from twostroke.engine.loading.mapped import in_huge_pages, map_file
from twostroke.engine.loading.parts import on_threads
from twostroke.engine.matrix import Matrix, WeightMode

LAYOUT_VERSION = 1  # raised whenever the same files would make other parts: fusing, rounding, dequantizing
DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
LENGTH = struct.Struct("<Q")  # of the header, in front of it
MAX_HEADER_BYTES = 100_000_000  # as safetensors has it

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Damaged(Exception):
    """A prepared file is not what it should be; the message says how."""


@dataclass(frozen=True, slots=True)
class Part:
    """Where a tensor lies in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    checksum: str


def prepared_name(weights_digest: bytes, mode: WeightMode) -> str:
    """Name the prepared file of a model in a mode."""
    return f"{weights_digest.hex()}-{mode.value}-{LAYOUT_VERSION}.safetensors"


def matrix_name(pieces: Sequence[tuple[str, int]]) -> str:
    """Name a fused matrix by all it was stacked from."""
    return "+".join(name for name, _ in pieces)


def checksum(raw: Any) -> str:
    """XXH3 over a buffer, in hexadecimal; releases the interpreter lock."""
    return xxhash.xxh3_64_hexdigest(raw)


def seal_of(header: Mapping[str, Any]) -> str:
    """Return the checksum of a header, whatever seal its `__metadata__` holds."""
    unsealed = {**header, "__metadata__": {**header["__metadata__"], "seal": ""}}
    return checksum(json.dumps(unsealed, sort_keys=True).encode())


class PreparedFile:
    """A prepared file, mapped.

    It is locked (flock, shared) as long as the mapping lives: until this object and the last tensor taken from it are
    gone. A locked file is in use, and is not evicted.

    Attributes:
        in_huge_pages: whether tensors are read as fast as copies in huge pages, so that copies would be a waste.
    """

    def __init__(self, path: Path) -> None:
        """Open and map.

        Raises:
            Damaged: the file is not sound, or not the one its name says.
            BlockingIOError: somebody is about to finish or to remove it; try again.
            OSError: it is not there, or cannot be read or mapped.
        """
        self.path = path
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            found = os.fstat(descriptor)
            if not found.st_nlink:  # removed before it was locked
                raise BlockingIOError(f"{path} was removed")
            if not found.st_size:
                raise Damaged("it is empty")
            self._inode = found.st_ino
            self._bytes = map_file(descriptor, found.st_size)  # keeps the descriptor open, and with it the lock
        finally:
            os.close(descriptor)
        self._parts = _read_header(self._bytes, path.name)
        self.in_huge_pages = in_huge_pages(self._bytes)

    def take(self, name: str, *shape: int) -> Tensor:
        """Return one tensor as a view of the mapping. Raises Damaged."""
        part = self._parts.get(name)
        if part is None or part.shape != shape:
            raise Damaged(f"it does not hold {name} {list(shape)}")
        count = torch.Size(shape).numel()
        tensor = torch.frombuffer(self._bytes, dtype=part.dtype, count=count, offset=part.begin)
        if checksum(tensor.view(torch.uint8).numpy()) != part.checksum:
            raise Damaged(f"the bytes of {name} are not those that were written")
        return tensor.view(shape)

    def let_go(self) -> None:
        """Give back what was mapped to be copied. What is still used comes back by itself, from the page cache."""
        if hasattr(mmap, "MADV_DONTNEED") and not self.in_huge_pages:
            self._bytes.madvise(mmap.MADV_DONTNEED)  # drops nothing of ours: these pages are never written to

    def discard(self, damage: Damaged) -> None:
        """Remove the file, so that it is made anew."""
        _log.warning("prepared weights are damaged", extra={"file": self.path.name, "why": str(damage)})
        remove(self.path, self._inode)


def remove(path: Path, inode: int) -> None:
    """Remove `path`, unless another file has taken its place; the log says when that cannot be done."""
    try:
        if path.stat().st_ino == inode:
            path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning("a file of the weights cache was left", extra={"file": path.name, "why": str(error)})


def _read_header(raw: mmap.mmap, identity: str) -> dict[str, Part]:
    try:
        (length,) = LENGTH.unpack_from(raw)
        if length > min(len(raw), MAX_HEADER_BYTES):
            raise Damaged("its header is longer than the file")
        start = LENGTH.size + length
        header = json.loads(raw[LENGTH.size : start])
        metadata = header["__metadata__"]
        if metadata["seal"] != seal_of(header):
            raise Damaged("its header is not the one that was written")
        if metadata["identity"] != identity:
            raise Damaged(f"it was made as {metadata['identity']}")
        if start + int(metadata["bytes"]) != len(raw):
            raise Damaged(f"it has {len(raw)} bytes instead of {start + int(metadata['bytes'])}")
        sums = json.loads(metadata["checksums"])
        return {
            name: Part(DTYPES[each["dtype"]], tuple(each["shape"]), start + each["data_offsets"][0], sums[name])
            for name, each in header.items()
            if name in sums
        }
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged("its header cannot be read") from error


class PreparedParts:
    """Parts taken from a prepared file. `checkpoint` is asked for names only.

    Raises:
        Damaged: from `matrix` and `vector`, when the file does not hold them as they were written.
    """

    def __init__(self, file: PreparedFile, checkpoint: Checkpoint, mode: WeightMode) -> None:
        self._file, self._checkpoint, self._mode = file, checkpoint, mode

    def has(self, name: str) -> bool:
        """Say whether the model's own files hold `name`."""
        return self._checkpoint.has(name)

    def matrix(self, *pieces: tuple[str, int], columns: int, bias: bool = False) -> Matrix:
        """Map a matrix that was fused under the same names."""
        name, rows = matrix_name(pieces), sum(rows for _, rows in pieces)
        return Matrix(
            self._file.take(f"{name}.values", rows, columns),
            self._file.take(f"{name}.scales", rows) if self._mode is WeightMode.INT8 else None,
            self._file.take(f"{name}.bias", rows) if bias else None,
            in_huge_pages=self._file.in_huge_pages,
        )

    def vector(self, name: str, size: int) -> Tensor:
        """Map one vector."""
        return self._file.take(name, size)

    def layers(self, build: Callable[[int], _T], count: int) -> tuple[_T, ...]:
        """Build on a few threads."""
        return on_threads(build, count)
