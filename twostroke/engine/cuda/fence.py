"""Fences: how the host waits for what it has given to a device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Fence(Protocol):
    """A place in the order of a device's work; `torch.cuda.Event` is one."""

    def record(self) -> None:
        """Move the fence behind all work that was given to the current stream."""

    def synchronize(self) -> None:
        """Return once the device has passed the fence; at once when it was never recorded."""


class Passed:
    """The fence of memory that the host itself works on: it is always passed."""

    def record(self) -> None:
        """Nothing is outstanding."""

    def synchronize(self) -> None:
        """Nothing is outstanding."""


def fence_on(device: torch.device) -> Fence:
    """Return a fence for the work of `device`."""
    return torch.cuda.Event() if device.type == "cuda" else Passed()  # type: ignore[no-untyped-call]


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Send a host tensor to the device without waiting for it.

    It goes through pinned memory, whose allocator keeps a buffer until the device has read it.
    """
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def send(values: Tensor, into: Tensor) -> None:
    """Send a host tensor to the first places of one on the device, without waiting for it, as `upload` does."""
    target = into[: len(values)]
    target.copy_(values.pin_memory() if into.device.type == "cuda" else values, non_blocking=True)
