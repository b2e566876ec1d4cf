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

from twostroke.engine.loading.parts import Parts
from twostroke.engine.loading.prepared import DTYPES, LENGTH, checksum, matrix_name, remove, sealed
from twostroke.engine.matrix import Matrix, WeightMode, stored_bytes

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
        self._header: dict[str, object] = {}
        self._checksums: dict[str, str] = {}
        self._failure: OSError | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one part; one that was written before is left."""
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        with self._lock:
            if self._failure is not None or name in self._header:
                return
            begin = self._place(name, _NAMES[tensor.dtype], list(tensor.shape), raw.size)
        try:
            _write(self._descriptor, raw.data, self._start + begin)
        except OSError as error:
            self._failure = error
        self._checksums[name] = checksum(raw)

    def publish(self) -> None:
        """Write the header, bring all to the disk, and take the name without the suffix."""
        path = self._path.with_suffix("")
        try:
            if self._failure is not None:
                raise self._failure
            metadata = {
                "identity": path.name,
                "bytes": str(self._end),
                "checksums": json.dumps(self._checksums, sort_keys=True),
            }
            self._write_header({"__metadata__": metadata, **self._header})
            os.fsync(self._descriptor)
            self._path.rename(path)
            _sync_folder(path.parent)
            _log.info("weights were prepared for later starts", extra={"file": path.name, "bytes": self._end})
        except OSError as error:
            _log.warning("weights could not be prepared for later starts", extra={"file": path.name, "why": str(error)})

    def close(self) -> None:
        """Free the lock; a draft that was not published is removed."""
        remove(self._path, self._inode)
        os.close(self._descriptor)

    def _place(self, name: str, dtype: str, shape: list[int], size: int) -> int:
        """Give the next bytes to a part; safetensors allows no gaps, so what aligns it is a part of its own."""
        if gap := -self._end % _LINE:
            self._header[f"gap.{self._end}"] = _entry("U8", [gap], self._end, gap)
            self._end += gap
        begin = self._end
        self._header[name] = _entry(dtype, shape, begin, size)
        self._end += size
        return begin

    def _write_header(self, header: Mapping[str, object]) -> None:
        room = self._start - LENGTH.size
        text = sealed(header).encode()
        if len(text) > room:
            raise OSError(f"its header takes {len(text)} bytes, {room} were kept")
        _write(self._descriptor, memoryview(LENGTH.pack(room) + text.ljust(room)), 0)


def _entry(dtype: str, shape: list[int], begin: int, size: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size]}


def _write(descriptor: int, raw: memoryview, at: int) -> None:
    while raw:  # a call may write less than it is given
        written = os.pwrite(descriptor, raw, at)
        raw, at = raw[written:], at + written


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
