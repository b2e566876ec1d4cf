"""The backend that tests use where they do not compare backends, and those that are held to the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.support.emulated import emulated_backend
from twostroke.engine.backend import Backend
from twostroke.engine.backends.choice import Device, choose_backend
from twostroke.engine.backends.native import NativeBackend
from twostroke.engine.backends.torch import TorchBackend, has_packed_kernels
from twostroke.engine.native.build import Unavailable, load_kernels

CPU = choose_backend(Device.CPU)


_FEATURES = {"x86-64-v3": "avx2", "x86-64-v4": "avx512f"}


def native_backend(processor: str = "native", *, threads: int = 1, exact: bool = False) -> NativeBackend:
    """Our own kernels, compiled for a kind of processor; the test is skipped where they cannot be or cannot run."""
    if processor in _FEATURES and _FEATURES[processor] not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this processor has no {_FEATURES[processor]}")
    try:
        return NativeBackend(load_kernels(processor), threads=threads, exact=exact)
    except Unavailable as reason:
        pytest.skip(str(reason))


# Every backend that runs here, made when it is asked for.
BACKENDS: Mapping[str, Callable[[], Backend]] = {
    "torch": lambda: TorchBackend(packs=has_packed_kernels()),
    "native": native_backend,
    "native, exact": lambda: native_backend(exact=True),
    "native, two threads": lambda: native_backend(threads=2),
    "native, AVX2": lambda: native_backend("x86-64-v3"),
    "native, AVX-512": lambda: native_backend("x86-64-v4"),
    "flashinfer-emulated": emulated_backend,
}


def attention_bound(backend: Backend) -> float:
    """How far attention may lie from float64, for inputs of unit size; tiles keep 16 bits of scores of any scale."""
    return 2e-4 if isinstance(backend, NativeBackend) and backend.on_tiles else 4e-6


def chunks_bound(backend: Backend) -> float:
    """How far logits of a tiny or small model may lie apart when a prompt runs in other chunks."""
    return 1e-3 if isinstance(backend, NativeBackend) and backend.on_tiles else 2e-4
