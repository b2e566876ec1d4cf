"""The compiled kernels: what they are called and how they are called. `kernels/kernels.c` declares the same."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any, cast

HALF, BFLOAT, INT8, FLOAT = range(4)  # kinds of number


class CMatrix(Structure):
    """`matrix` in kernels/matrix.h."""

    _fields_ = (
        ("values", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("kind", c_int64),
    )


class CCache(Structure):
    """`cache` in kernels/attention.h."""

    _fields_ = (
        ("pages", c_void_p),
        ("page_bytes", c_int64),
        ("page_tokens", c_int64),
        ("kv_heads", c_int64),
        ("group", c_int64),
        ("head_dim", c_int64),
        ("kind", c_int64),
        ("scale", c_float),
    )


class CAttention(Structure):
    """`attention` in kernels/attention.h."""

    _fields_ = (
        ("kv", POINTER(CCache)),
        ("qo_indptr", c_void_p),
        ("kv_indptr", c_void_p),
        ("kv_indices", c_void_p),
        ("kv_last_page_len", c_void_p),
        ("items", c_void_p),
        ("merges", c_void_p),
        ("partial", c_void_p),
        ("window", c_int64),
        ("layer", c_int64),
        ("tiles", c_int64),
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("out", c_void_p),
    )


class Library:
    """A loaded library. Calls release the interpreter lock; pointers must stay valid until they return.

    Attributes:
        has_tiles: whether many tokens are multiplied on AMX tiles, at many times the speed of vectors.
    """

    def __init__(self, path: Path) -> None:
        """Load the file at `path`; raises OSError when it cannot be loaded."""
        self._library = ctypes.CDLL(str(path))
        self.linear = self._function("linear", c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64)
        self.dense = self._function("dense", c_void_p, c_void_p)
        self.rms_norm = self._function(
            "rms_norm", c_void_p, c_int64, c_void_p, c_float, c_void_p, c_int64, c_int64, c_int64
        )
        self.rotate = self._function("rotate", c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_int64)
        self.gated = self._function("gated", c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64)
        placed = (c_void_p, c_int64)  # numbers, and from one token to the next
        self.append = self._function("append", c_void_p, c_int64, *placed, *placed, c_void_p, c_void_p, c_int64)
        self.attend = self._function("attend", c_void_p, c_int64, c_int64, c_int64)
        prepare = self._library.twostroke_prepare
        prepare.restype, prepare.argtypes = c_int64, ()
        self.has_tiles = bool(prepare())

    def _function(self, name: str, *arguments: type) -> Callable[..., Any]:
        function = getattr(self._library, f"twostroke_{name}")
        function.restype, function.argtypes = None, arguments
        return cast("Callable[..., Any]", function)
