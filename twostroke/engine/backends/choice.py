"""Which backend runs on this machine."""

from __future__ import annotations

import logging
import os

from twostroke.engine.backend import Backend
from twostroke.engine.backends.flashinfer import open_flashinfer
from twostroke.engine.backends.native import NativeBackend
from twostroke.engine.backends.torch import TorchBackend, has_packed_kernels
from twostroke.engine.device import Device
from twostroke.engine.mode import WeightMode
from twostroke.engine.native.build import Unavailable, load_kernels
from twostroke.errors import BackendUnavailable

__all__ = ["Device", "choose_backend", "default_mode", "usable_processors"]

_log = logging.getLogger(__name__)
_MOST_THREADS = 8  # by default: a pass over few tokens is bound by memory, which a few processors exhaust


def choose_backend(device: Device, *, mode: WeightMode | None = None, threads: int | None = 1) -> Backend:
    """Return the fastest backend for `device`.

    Args:
        device: a choice; AUTO takes the CPU, with one line that says why, where the GPU cannot be used.
        mode: of the weights; None for the device's own, see `default_mode`.
        threads: of one operation on a CPU; None for all idle processors if the kernels are our own, else for one.

    Raises:
        BackendUnavailable: CUDA was asked for and cannot be used.
    """
    if device is not Device.CPU:
        try:
            return open_flashinfer(mode or WeightMode.BF16)
        except BackendUnavailable as reason:
            if device is Device.CUDA:
                raise
            _log.info("the CPU computes: %s", reason)
    return _on_cpu(threads, exact=mode is WeightMode.F32)


def default_mode(backend: Backend) -> WeightMode:
    """Return the mode of weights that suits a backend: float16 on a CPU, bfloat16 on a GPU."""
    return WeightMode.F16 if backend.device.type == "cpu" else WeightMode.BF16


def usable_processors() -> int:
    """How many threads a pass may have by default: they step aside while others need the processors."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _on_cpu(threads: int | None, *, exact: bool) -> Backend:
    """Take our own kernels, or torch's with one line that says why."""
    try:
        return NativeBackend(load_kernels(), threads=threads or usable_processors(), exact=exact)
    except Unavailable as reason:
        _log.warning("torch computes instead of the faster kernels: %s", reason)
        return TorchBackend(packs=has_packed_kernels(), threads=threads or 1)
