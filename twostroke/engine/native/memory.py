"""Memory in huge pages: weights, keys and values are read from end to end, and small pages make that a third slower."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from functools import cache
from typing import cast

import torch
from torch import Tensor

from twostroke.engine.native.room import free_bytes

_CHUNK_BYTES = 1 << 26
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which mmap does not name
_LINE = 64  # bytes of a cache line


class HugePages:
    """Copies tensors side by side into memory of their own; it is given back when the last of them is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # layers are built on several threads
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def place(self, tensor: Tensor) -> Tensor:
        """Return a copy of a CPU tensor, contiguous and aligned to a cache line."""
        size = tensor.numel() * tensor.element_size()
        with self._lock:
            if self._used + size > self._chunk.numel():
                self._chunk, self._used = zeros_in_huge_pages(max(size, _CHUNK_BYTES)), 0
            room = self._chunk[self._used : self._used + size]
            self._used += -(-size // _LINE) * _LINE
        return room.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def zeros_in_huge_pages(size: int) -> Tensor:
    """Return uint8 [size] of zeros that the kernel backs on first touch, by huge pages where it has them.

    Raises:
        OSError: the address space, or the machine's limit on promises, has no room for so many bytes.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


async def back_now(memory: Tensor) -> None:
    """Back `zeros_in_huge_pages` at once, where the kernel can: under load a first touch takes milliseconds.

    Raises:
        OSError: so much is not to be had.
    """
    if memory.nbytes > free_bytes():  # else the kernel would end a process
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    for piece in torch.split(memory, _CHUNK_BYTES):
        await asyncio.to_thread(_populate, piece)


def _populate(memory: Tensor) -> None:
    if _system_madvise()(memory.data_ptr(), memory.nbytes, _POPULATE_WRITE) != 0:
        number = ctypes.get_errno()
        if number != errno.EINVAL:  # which means: before Linux 5.14
            raise OSError(number, os.strerror(number))


@cache
def _system_madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None, use_errno=True).madvise  # mmap's own would hold the interpreter
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return cast("Callable[[int, int, int], int]", function)
