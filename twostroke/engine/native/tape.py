"""The calls of a step, noted once and made again in one go, without Python between them.

A small model's step of a few milliseconds is hundreds of calls. Made from Python they take one or two of these, and the
pool's threads fall asleep in between. The same calls read and write the same memory each time, so all that differs
between steps must lie where it lay.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from twostroke.engine.attention.native import NativeAttention, NativePlan
from twostroke.engine.batch import Batch
from twostroke.engine.native.library import CCall, Library

_FRESH = {torch.empty, Tensor.new_empty}
_LOOKS = {Tensor.view, Tensor.data_ptr, Tensor.stride, Tensor.numel, Tensor.dim, Tensor.shape.__get__}  # type: ignore[attr-defined]


class NotRecordable(Exception):
    """A step does something that is not ours to repeat; the message names it."""


class Tape:
    """Calls of a library, and whatever must stay alive for them.

    Args:
        calls: in order.
        keeps: the memory that they read and write.
    """

    def __init__(self, library: Library, calls: list[CCall], keeps: object) -> None:
        self._play, self._keeps = library.play, keeps
        self._calls = (CCall * len(calls))(*calls)

    def play(self) -> None:
        """Make all calls again."""
        self._play(ctypes.addressof(self._calls), len(self._calls))


class Scratch:
    """Memory for what layers compute, used in turn by one layer and the next, and again by the next but one.

    Shared by all tapes of an engine, which never play at once. Sizes are powers of two, so that many tapes of different
    numbers of rows take at most twice the memory of the largest.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int], Tensor] = {}
        self.begin(-1)

    def begin(self, layer: int) -> None:
        """Reuse what the last layer but one had."""
        self._side, self._count = layer % 2, 0

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Return float32 memory of a shape."""
        size = prod(shape)
        key = (self._side, self._count, 1 << (size - 1).bit_length())
        self._count += 1
        if key not in self._kept:
            self._kept[key] = torch.empty(key[2])
        return self._kept[key][:size].view(shape)


class RecordableAttention:
    """An AttentionBackend that says where a layer begins, so that memory can be used again."""

    def __init__(self, attention: NativeAttention) -> None:
        self._attention = attention
        self.library, self.scratch = attention.library, Scratch()

    def plan(self, batch: Batch) -> NativePlan:
        """Plan as ever."""
        return self._attention.plan(batch)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: NativePlan) -> Tensor:
        """Attend as ever."""
        self.scratch.begin(layer)
        return self._attention.attend(layer, q, k, v, plan)


def record(attention: RecordableAttention, run: Callable[[], Tensor], keeps: object) -> tuple[Tape, Tensor]:
    """Run once, and return a tape that does the same again, and what came out.

    Args:
        attention: by which `run` attends.
        run: calls the kernels; beside that it may only take memory and look at it in other shapes.
        keeps: what else it reads and writes.

    Raises:
        NotRecordable: it does more.
    """
    attention.scratch.begin(-1)
    with attention.library.recorded() as calls, _OnlyCalls(attention.scratch):
        out = run()
    return Tape(attention.library, calls, (attention.scratch, keeps)), out


class _OnlyCalls(TorchFunctionMode):
    """Gives out scratch memory for fresh tensors, and lets nothing else of torch pass but looks at one."""

    def __init__(self, scratch: Scratch) -> None:
        super().__init__()
        self._scratch = scratch

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See TorchFunctionMode."""
        if func in _FRESH and not kwargs:
            return self._scratch.empty(tuple(args[-1]))
        if func in _LOOKS or (func is Tensor.__getitem__ and not _copies(args[1])):
            return func(*args, **(kwargs or {}))
        raise NotRecordable(f"{func.__name__} is not a call of the kernels")


def _copies(index: object) -> bool:
    """Whether what is chosen by an index is not a view: by numbers or slices it is."""
    parts = index if isinstance(index, tuple) else (index,)
    return not all(isinstance(part, int | slice) for part in parts)
