"""Memory in huge pages: weights, keys and values are read from end to end, and small pages make that a third slower."""

from __future__ import annotations

import errno
import mmap
import threading

import torch
from torch import Tensor

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


def zeros_in_huge_pages(size: int, *, now: bool = False) -> Tensor:
    """Return uint8 [size] of zeros that the kernel backs on first touch, by huge pages where it has them.

    Args:
        size: bytes.
        now: back them at once, where the kernel can: a first touch under load may take tens of milliseconds.

    Raises:
        OSError: so much is not to be had.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    if now:
        try:
            memory.madvise(_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # which means: before Linux 5.14
                raise
    return torch.frombuffer(memory, dtype=torch.uint8)
