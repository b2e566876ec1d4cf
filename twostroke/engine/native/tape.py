"""The calls of a step, noted once and made again in one go, without Python between them.

A small model's step of a few milliseconds is hundreds of calls. Made from Python they take one or two of these, and the
pool's threads fall asleep in between. The same calls read and write the same memory each time, so all that differs
between steps must lie where it lay.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from twostroke.engine.native.library import CCall, Library, NotRecordable

_FRESH = {torch.empty, Tensor.new_empty}
_LOOKS = {Tensor.view, Tensor.data_ptr, Tensor.stride, Tensor.numel, Tensor.dim, Tensor.shape.__get__}  # type: ignore[attr-defined]


class Tape:
    """Calls of a library, and the memory that they read and write."""

    def __init__(self, library: Library, calls: list[CCall], memory: object) -> None:
        self._play, self._memory = library.play, memory
        self._calls = (CCall * len(calls))(*calls)

    def play(self, tokens: int) -> None:
        """Make all calls again, for another number of tokens."""
        self._play(ctypes.addressof(self._calls), len(self._calls), tokens)


def record(library: Library, run: Callable[[], Tensor], *, tokens: int, memory: list[Tensor]) -> Tape:
    """Return a tape of what `run` would do, for up to `tokens` tokens. Nothing is computed.

    Args:
        library: the kernels.
        run: calls them for so many tokens; beside that it may only take memory, a row a token, and look at it in other
            shapes. What it reads and writes beside that memory outlives the tape.
        tokens: what `run` calls them for.
        memory: what earlier tapes compute in, of which one is played at a time; this one does so too, and adds what it
            lacks. The largest goes first.

    Raises:
        NotRecordable: it does more.
    """
    with library.recorded(tokens) as calls, _OnlyCalls(_Scratch(tokens, memory)):
        run()
    return Tape(library, calls, memory)


class _Scratch:
    """Memory for what a step computes, given out again as soon as no tensor is left that looks at it."""

    def __init__(self, tokens: int, memory: list[Tensor]) -> None:
        self._tokens, self._memory = tokens, memory
        self._free = list(memory)

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Return float32 memory of a shape, whose first side is the tokens."""
        if shape[:1] != (self._tokens,):
            raise NotRecordable(f"memory of {list(shape)} is not for {self._tokens} tokens")
        size = prod(shape)
        memory = min((each for each in self._free if each.numel() >= size), key=Tensor.numel, default=None)
        if memory is None:
            memory = torch.zeros(size)  # touched now, since a first touch takes time
            self._memory.append(memory)
        else:
            self._free = [each for each in self._free if each is not memory]
        given = memory[:size].view(shape)
        weakref.finalize(given, self._take_back, memory)
        return given

    def _take_back(self, memory: Tensor) -> None:
        self._free.append(memory)


class _OnlyCalls(TorchFunctionMode):
    """Gives out scratch memory for fresh tensors, and lets nothing else of torch pass but looks at one."""

    def __init__(self, scratch: _Scratch) -> None:
        super().__init__()
        self._scratch = scratch

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See TorchFunctionMode."""
        if func in _FRESH and not kwargs and isinstance(args[-1], tuple):
            return self._scratch.empty(args[-1])
        if func not in _LOOKS and (func is not Tensor.__getitem__ or _copies(args[1])):
            raise NotRecordable(f"{func.__name__} is not a call of the kernels")
        seen = func(*args, **(kwargs or {}))
        if isinstance(seen, Tensor):
            seen.looks_at = args[0]  # type: ignore[attr-defined]  # which lives as long
        return seen


def _copies(index: object) -> bool:
    """Whether what is chosen by an index is not a view: by numbers or slices it is."""
    parts = index if isinstance(index, tuple) else (index,)
    return not all(isinstance(part, int | slice) for part in parts)
