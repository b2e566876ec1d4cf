"""The names of devices, apart from their arithmetic: what is told a device need not load torch."""

from __future__ import annotations

import enum


class Device(enum.StrEnum):
    """Where a worker computes."""

    AUTO = "auto"  # on a GPU when there is one that works, else on the CPU
    CPU = "cpu"
    CUDA = "cuda"
