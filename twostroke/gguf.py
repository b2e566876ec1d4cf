"""Reads the header of a GGUF file: its metadata and where each tensor lies. Needs neither numpy nor torch.

Written from the format's specification (ggml, docs/gguf.md), because the reader of the `gguf` package wraps every one
of some hundred thousand vocabulary entries in an array: two seconds and 160 MB for a model of 98 MB. Files are not
trusted: every length is checked against what is left of the header before anything is allocated.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

from twostroke.errors import ModelError, UnsupportedModel

MAX_HEADER_BYTES = 256 << 20
MAX_ARRAY_ITEMS = 1 << 22
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

GgufScalar: TypeAlias = str | int | float | bool
GgufValue: TypeAlias = GgufScalar | tuple[GgufScalar, ...]
_T = TypeVar("_T", str, int, float, bool)

_VERSIONS = (2, 3)
_END_KEYS = ("eos", "eot", "eom")  # end of text, of turn, of message
_END_NAMES = frozenset({"<end_of_turn>"})
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")  # of a string, in front of it
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies.

    `shape` is outermost first (the file holds it reversed); `offset` counts bytes from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: int  # ggml type number
    offset: int


class GgufMetadata(Mapping[str, GgufValue]):
    """The key-value pairs of a GGUF file. The typed look-ups return None for an absent key.

    Raises:
        ModelError: from a typed look-up, when the key holds another type.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, GgufValue]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> GgufValue:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def text(self, key: str) -> str | None:
        """Return the string under `key`."""
        return self._scalar(key, str)

    def flag(self, key: str) -> bool | None:
        """Return the truth value under `key`."""
        return self._scalar(key, bool)

    def integer(self, key: str) -> int | None:
        """Return the integer under `key`."""
        return self._scalar(key, int)

    def number(self, key: str) -> float | None:
        """Return the number under `key`, which must be finite; an integer will do."""
        value = self._values.get(key)
        number = float(value) if type(value) is int else self._scalar(key, float)
        if number is not None and not math.isfinite(number):
            raise ModelError(f"GGUF key {key} is {number}, which is no number to compute with")
        return number

    def strings(self, key: str) -> tuple[str, ...] | None:
        """Return the array of strings under `key`."""
        return self._array(key, str)

    def integers(self, key: str) -> tuple[int, ...] | None:
        """Return the array of integers under `key`."""
        return self._array(key, int)

    def numbers(self, key: str) -> tuple[float, ...] | None:
        """Return the array of floating-point numbers under `key`."""
        return self._array(key, float)

    def _scalar(self, key: str, kind: type[_T]) -> _T | None:
        value = self._values.get(key)
        if value is None or type(value) is kind:  # exact: bool is an int to isinstance
            return value
        raise ModelError(f"GGUF key {key} holds {type(value).__name__}, not {kind.__name__}")

    def _array(self, key: str, kind: type[_T]) -> tuple[_T, ...] | None:
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, tuple) or (value and type(value[0]) is not kind):  # an array has one element type
            raise ModelError(f"GGUF key {key} is not an array of {kind.__name__}")
        return value  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """All of a GGUF file but the tensor data itself."""

    version: int
    metadata: GgufMetadata
    tensors: tuple[TensorInfo, ...]


def read_metadata(path: Path) -> GgufMetadata:
    """Read the key-value pairs of the GGUF file at `path`.

    Raises:
        ModelError: the file is unreadable, damaged, or its header is larger than MAX_HEADER_BYTES.
        UnsupportedModel: another version or byte order of the format.
    """
    return read_header(path).metadata


def read_header(path: Path) -> GgufHeader:
    """Read the metadata and tensor directory of the GGUF file at `path`; raises as `read_metadata` does."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data, min(len(data), MAX_HEADER_BYTES), path.name), len(data))
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelError(f"cannot read {path.name}: {error}") from error


def end_tokens(metadata: GgufMetadata) -> frozenset[int]:
    """Unite all tokens that may end an answer.

    They are those that keys name, and the end of a turn of Gemma, which files of its base models leave unnamed.
    """
    named = (metadata.integer(f"tokenizer.ggml.{key}_token_id") for key in _END_KEYS)
    pieces = metadata.strings("tokenizer.ggml.tokens") or ()
    known = (id_ for id_, piece in enumerate(pieces) if piece in _END_NAMES)
    return frozenset(token for token in (*named, *known) if token is not None)


class _Cursor:
    """A position in the header that cannot pass its end."""

    def __init__(self, data: mmap.mmap, end: int, name: str) -> None:
        self.data, self.end, self.name = data, end, name
        self.at = 0

    def bad(self, what: str) -> ModelError:
        return ModelError(f"{self.name} is not a sound GGUF file: {what} (byte {self.at})")

    def need(self, size: int) -> int:
        """Move over `size` bytes and return where they start."""
        start = self.at
        if size > self.end - start:
            raise self.bad(f"{size} bytes are needed and {self.end - start} are left")
        self.at = start + size
        return start

    def scalar(self, code: str) -> int:
        """One little-endian integer."""
        value: int = struct.unpack_from("<" + code, self.data, self.need(struct.calcsize(code)))[0]
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> tuple[str, ...]:
        """Read a hundred thousand in tens of milliseconds: nothing of ours is called for each."""
        data, end, length, found = self.data, self.end, _LENGTH.unpack_from, []
        for _ in range(count):
            start = self.at + _LENGTH.size
            stop = start + length(data, self.at)[0] if start <= end else start
            if stop > end:
                self.need(stop - self.at)
            try:
                found.append(data[start:stop].decode())
            except UnicodeDecodeError as error:
                raise self.bad("a string is not UTF-8") from error
            self.at = stop
        return tuple(found)

    def value(self, kind: int) -> GgufValue:
        if kind == _STRING:
            return self.string()
        return self.array() if kind == _ARRAY else self.scalars(kind, 1)[0]

    def array(self) -> tuple[GgufScalar, ...]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > MAX_ARRAY_ITEMS:
            raise self.bad(f"an array of {count} items")
        if kind == _STRING:
            return self.strings(count)
        return self.scalars(kind, count)

    def scalars(self, kind: int, count: int) -> tuple[GgufScalar, ...]:
        code = _SCALARS.get(kind)
        if code is None:
            raise self.bad(f"unknown value type {kind}")
        start = self.need(count * struct.calcsize("<" + code))
        return struct.unpack_from(f"<{count}{code}", self.data, start)


def _parse(cursor: _Cursor, file_bytes: int) -> GgufHeader:
    if cursor.data[:4] != b"GGUF":
        raise cursor.bad("it does not start with GGUF")
    cursor.need(4)
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise UnsupportedModel(f"{cursor.name} is GGUF version {version} (or big-endian); versions 2 and 3 are read")
    tensor_count, pair_count = cursor.scalar("Q"), cursor.scalar("Q")
    values: dict[str, GgufValue] = {}
    for _ in range(pair_count):  # each turn takes bytes, so a false count ends at the header's end
        key = cursor.string()
        if key in values:
            raise cursor.bad(f"key {key} occurs twice")
        values[key] = cursor.value(cursor.scalar("I"))
    metadata = GgufMetadata(values)
    return GgufHeader(version, metadata, _tensors(cursor, tensor_count, _alignment(cursor, metadata), file_bytes))


def _alignment(cursor: _Cursor, metadata: GgufMetadata) -> int:
    alignment = metadata.integer("general.alignment")
    if alignment is None:
        return DEFAULT_ALIGNMENT
    if alignment < 1 or alignment & (alignment - 1):
        raise cursor.bad(f"general.alignment is {alignment}, not a power of two")
    return alignment


def _tensors(cursor: _Cursor, count: int, alignment: int, file_bytes: int) -> tuple[TensorInfo, ...]:
    found: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name, dimensions = cursor.string(), cursor.scalar("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS or name in found:
            raise cursor.bad(f"tensor {name} occurs twice or has {dimensions} dimensions")
        shape = tuple(reversed([cursor.scalar("Q") for _ in range(dimensions)]))
        found[name] = (shape, cursor.scalar("I"), cursor.scalar("Q"))
    data_start = -(-cursor.at // alignment) * alignment
    for name, (_, _, offset) in found.items():
        if offset % alignment or data_start + offset > file_bytes:
            raise cursor.bad(
                f"tensor {name} starts at {offset}, off the alignment of {alignment} or past the file's end"
            )
    return tuple(TensorInfo(name, shape, kind, data_start + offset) for name, (shape, kind, offset) in found.items())
