"""The C heap of a process that moves blocks in messages, each as large as a block and soon free again."""

from __future__ import annotations

import ctypes

# From <malloc.h> of glibc.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

MAPPED_BYTES = 32 << 20  # what is larger gets pages of its own from the kernel, which go back at once
SPARE_BYTES = 64 << 20  # free memory at the end of a heap, at most


def keep_freed_memory() -> None:
    """Have freed memory used again instead of giving it back to the kernel after each message.

    By default glibc returns what is free beyond 128 KiB, so each message's memory is new: its pages fault one by one
    and are zeroed, which takes longer than all copies of a message. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)  # setting either ends that both follow what the process frees
        mallopt(_M_TRIM_THRESHOLD, SPARE_BYTES)
