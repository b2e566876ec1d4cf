"""The compiled kernels: what they are called and how they are called. `kernels/kernels.c` declares the same."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
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
    """`cache` in kernels/paged.h."""

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
    """`attention` in kernels/paged.h."""

    _fields_ = (
        ("kv", POINTER(CCache)),
        ("slot_page", c_void_p),
        ("slot_offset", c_void_p),
        ("qo_indptr", c_void_p),
        ("kv_indptr", c_void_p),
        ("kv_indices", c_void_p),
        ("kv_last_page_len", c_void_p),
        ("items", c_void_p),
        ("merges", c_void_p),
        ("item_count", c_int64),
        ("merge_count", c_int64),
        ("partial", c_void_p),
        ("tiles", c_int64),
        ("layer", c_int64),
        ("window", c_int64),
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("out", c_void_p),
    )


_PLACED = (c_void_p, c_int64)  # numbers, and from one token to the next
# What a step is made of, in the order of kernels/kernels.c, with its arguments; threads come last where there are any.
_CALLS: Mapping[str, tuple[type, ...]] = {
    "linear": (c_void_p, *_PLACED, c_void_p, c_int64, c_int64, c_int64),
    "rms_norm": (*_PLACED, c_int64, c_void_p, c_float, c_void_p, c_int64, c_int64, c_int64),
    "rotate": (*_PLACED, c_int64, c_int64, c_int64, c_void_p, c_int64),
    "gated": (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64),
    "add": (c_void_p, c_void_p, c_int64),
    "append": (c_void_p, c_int64, *_PLACED, *_PLACED, c_int64),
    "attend": (c_void_p, c_int64, c_int64, *_PLACED, c_void_p, c_int64),
}
_TOKENS = {"linear": 4, "rms_norm": 6, "rotate": 2, "gated": 2, "add": 2, "append": 6}  # arguments that count tokens
_MOST_ARGUMENTS = 9


class CCall(Structure):
    """`call` in kernels/kernels.c."""

    _fields_ = (("function", c_int64), ("arguments", c_int64 * _MOST_ARGUMENTS))


class NotRecordable(Exception):
    """A step does something that is not ours to repeat; the message names it."""


class Library:
    """A loaded library. Calls release the interpreter lock; pointers must stay valid until they return.

    Attributes:
        has_tiles: whether many tokens are multiplied on AMX tiles, at many times the speed of vectors.
    """

    linear: Callable[..., None]
    rms_norm: Callable[..., None]
    rotate: Callable[..., None]
    gated: Callable[..., None]
    add: Callable[..., None]
    append: Callable[..., None]
    attend: Callable[..., None]

    def __init__(self, path: Path) -> None:
        """Load the file at `path`; raises OSError when it cannot be loaded."""
        self._library = ctypes.CDLL(str(path))
        self._functions = {name: self._function(name, *arguments) for name, arguments in _CALLS.items()}
        self.__dict__.update(self._functions)
        self.play = self._function("play", c_void_p, c_int64, c_int64)
        self._recording = threading.Lock()
        prepare = self._library.twostroke_prepare
        prepare.restype, prepare.argtypes = c_int64, ()
        self.has_tiles = bool(prepare())

    @contextmanager
    def recorded(self, tokens: int) -> Iterator[list[CCall]]:
        """Note the calls of this thread for so many tokens within the block, instead of making them.

        What other threads call meanwhile is made, and not noted. Tokens are noted as for one.

        Raises:
            NotRecordable: a call is not for a number of rows for each token.
        """
        calls: list[CCall] = []
        thread = threading.get_ident()

        def noting(number: int, name: str) -> Callable[..., None]:
            function, kinds, counted = self._functions[name], _CALLS[name], _TOKENS.get(name)

            def noted(*arguments: Any) -> None:
                if threading.get_ident() != thread:
                    function(*arguments)
                    return
                values = list(map(_as_integer, kinds, arguments))
                if counted is not None:
                    values[counted], left = divmod(values[counted], tokens)
                    if left:
                        raise NotRecordable(f"{name} is not for as many rows for each token")
                calls.append(CCall(number, tuple(values)))

            return noted

        with self._recording:
            self.__dict__.update({name: noting(number, name) for number, name in enumerate(_CALLS)})
            try:
                yield calls
            finally:
                self.__dict__.update(self._functions)

    def _function(self, name: str, *arguments: type) -> Callable[..., None]:
        function = getattr(self._library, f"twostroke_{name}")
        function.restype, function.argtypes = None, arguments
        return cast("Callable[..., None]", function)


def _as_integer(kind: type, argument: float | None) -> int:
    """An address or number as an int64; a float's bits are its lower half."""
    if kind is c_float:
        return c_int32.from_buffer(c_float(cast("float", argument))).value
    return int(argument or 0)
