"""The backend that tests use where they do not compare backends, and those that are held to the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.support.emulated import emulated_backend
from twostroke.engine.backend import Backend
from twostroke.engine.backends.choice import Device, choose_backend
from twostroke.engine.backends.torch import TorchBackend, has_packed_kernels

CPU = choose_backend(Device.CPU)

# Every backend that runs here, made when it is asked for.
BACKENDS: Mapping[str, Callable[[], Backend]] = {
    "torch": lambda: TorchBackend(packs=has_packed_kernels()),
    "flashinfer-emulated": emulated_backend,
}
