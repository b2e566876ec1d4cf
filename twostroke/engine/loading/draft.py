"""Prepared files in the making: each part is written as it is read, so that memory never holds them all."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from twostroke.engine.loading.mapped import HUGE_PAGE_BYTES
from twostroke.engine.loading.parts import Parts
from twostroke.engine.loading.prepared import DTYPES, LENGTH, checksum, matrix_name, remove, seal_of
from twostroke.engine.matrix import Matrix, WeightMode, stored_bytes
from twostroke.folders import sync_folder

_log = logging.getLogger(__name__)
_LINE = 64  # bytes: parts start on cache lines
_PAGE = 4_096
_ENTRY_BYTES = 512  # of a tensor in a header, beside its name: which stands in up to eight places, escaped
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_T = TypeVar("_T")


class Draft:
    """A file that this process alone writes, locked, beside the place it will take; a crash leaves it unlocked.

    Room for the header is kept in front, and the header written last. Nothing here raises: a draft that cannot be
    written is given up, with one log line, and the model loads without it.
    """

    def __init__(self, path: Path, descriptor: int, *, header_bytes: int) -> None:
        """Take over `descriptor`, an empty file at `path` under an exclusive lock."""
        self._path, self._descriptor = path, descriptor
        self._inode = os.fstat(descriptor).st_ino
        self._start = -(-(LENGTH.size + header_bytes) // _PAGE) * _PAGE
        self._lock = threading.Lock()  # layers are read on several threads
        self._end = 0  # of the parts, from `_start`
        self._values = _HugePages(descriptor, self._start)
        self._header: dict[str, object] = {}
        self._checksums: dict[str, str] = {}
        self._failure: OSError | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one part; one that was written before is left."""
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        with self._lock:
            if self._failure is not None or name in self._header:
                return
            try:
                self._place(name, _NAMES[tensor.dtype], list(tensor.shape), raw.size)
                self._values.append(raw.data)
            except OSError as error:
                self._failure = error
        self._checksums[name] = checksum(raw)

    def publish(self) -> None:
        """Write the header, bring all to the disk, and take the name without the suffix."""
        path = self._path.with_suffix("")
        try:
            if self._failure is not None:
                raise self._failure
            self._values.finish()
            metadata = {
                "identity": path.name,
                "bytes": str(self._end),
                "checksums": json.dumps(self._checksums, sort_keys=True),
            }
            self._write_header(metadata)
            os.fsync(self._descriptor)
            self._path.rename(path)
            sync_folder(path.parent)
            _log.info("weights were prepared for later starts", extra={"file": path.name, "bytes": self._end})
        except OSError as error:
            _log.warning("weights could not be prepared for later starts", extra={"file": path.name, "why": str(error)})

    def close(self) -> None:
        """Free the lock; a draft that was not published is removed."""
        remove(self._path, self._inode)
        os.close(self._descriptor)

    def _place(self, name: str, dtype: str, shape: list[int], size: int) -> None:
        """Give the next bytes to a part; safetensors allows no gaps, so what aligns it is a part of its own."""
        if gap := -self._end % _LINE:
            self._header[f"gap.{self._end}"] = _entry("U8", [gap], self._end, gap)
            self._end += gap
            self._values.append(memoryview(bytes(gap)))
        self._header[name] = _entry(dtype, shape, self._end, size)
        self._end += size

    def _write_header(self, metadata: Mapping[str, str]) -> None:
        room = self._start - LENGTH.size
        seal = seal_of({"__metadata__": metadata, **self._header})
        text = json.dumps({"__metadata__": {**metadata, "seal": seal}, **self._header}).encode()
        if len(text) > room:
            raise OSError(f"its header takes {len(text)} bytes, {room} were kept")
        _write(self._descriptor, memoryview(LENGTH.pack(room) + text.ljust(room)), 0)


class _HugePages:
    """Writes a file in pieces of whole huge pages, but for its beginning and its end.

    A file system that knows large pages of its cache (ext4, xfs, btrfs) keeps each in one, and maps them as such: they
    are read as fast as huge pages of a process's own.
    """

    def __init__(self, descriptor: int, start: int) -> None:
        self._descriptor = descriptor
        self._at = start // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        self._rest = bytearray(start - self._at)  # from there; less than a huge page

    def append(self, raw: memoryview) -> None:
        """Write what fills huge pages, and keep the rest for what follows. Raises OSError."""
        if (room := HUGE_PAGE_BYTES - len(self._rest)) <= len(raw):
            self._rest += raw[:room]
            self.finish()
            whole = (len(raw) - room) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            self._write(raw[room : room + whole])
            raw = raw[room + whole :]
        self._rest += raw

    def finish(self) -> None:
        """Write what is left. Raises OSError."""
        self._write(memoryview(self._rest))
        self._rest = bytearray()

    def _write(self, raw: memoryview) -> None:
        _write(self._descriptor, raw, self._at)
        self._at += len(raw)


def _entry(dtype: str, shape: list[int], begin: int, size: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size]}


def _write(descriptor: int, raw: memoryview, at: int) -> None:
    while raw:  # a call may write less than it is given
        written = os.pwrite(descriptor, raw, at)
        raw, at = raw[written:], at + written


def needed_bytes(shapes: Mapping[str, tuple[int, ...]], mode: WeightMode) -> tuple[int, int]:
    """Return how much parts made of these tensors take at most, and how much a header that lists them."""
    gaps = 2 * _LINE * len(shapes)  # each tensor adds to two parts at most: values and scales
    return stored_bytes(shapes.values(), mode) + gaps, _PAGE + sum(_ENTRY_BYTES + 8 * len(name) for name in shapes)


class RecordedParts:
    """Hands out the parts of `parts`, and keeps each in a draft on the way."""

    def __init__(self, parts: Parts, draft: Draft) -> None:
        self._parts, self._draft = parts, draft

    def has(self, name: str) -> bool:
        """Say whether the model holds tensor `name`."""
        return self._parts.has(name)

    def matrix(self, *pieces: tuple[str, int], columns: int, bias: bool = False) -> Matrix:
        """Keep a matrix with its scales and biases."""
        matrix = self._parts.matrix(*pieces, columns=columns, bias=bias)
        for what, tensor in (("values", matrix.values), ("scales", matrix.scales), ("bias", matrix.bias)):
            if tensor is not None:
                self._draft.add(f"{matrix_name(pieces)}.{what}", tensor)
        return matrix

    def vector(self, name: str, size: int) -> Tensor:
        """Keep one vector."""
        vector = self._parts.vector(name, size)
        self._draft.add(name, vector)
        return vector

    def layers(self, build: Callable[[int], _T], count: int) -> tuple[_T, ...]:
        """Build as `parts` does."""
        return self._parts.layers(build, count)
