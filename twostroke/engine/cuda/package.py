"""The one place that imports FlashInfer, and the one that says why a GPU cannot be used.

The package reads its settings from the environment while it is imported, and makes a folder then. So it is imported
late, once a device is known to be there, and never by a module's own import.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from pathlib import Path
from types import ModuleType

import torch

from twostroke.errors import BackendUnavailable

OLDEST, BEYOND = (0, 6, 8), (0, 8)  # versions whose calls are those that the emulated tests hold us to
_CAPABILITY = (8, 0)  # Ampere: the first with bfloat16 tensor cores
_DISTRIBUTION = "flashinfer-python"


def require_device() -> torch.device:
    """Return the CUDA device that this process computes on: the first that it sees.

    Raises:
        BackendUnavailable: there is none, or it is too old.
    """
    if not torch.cuda.is_available():
        raise BackendUnavailable("torch sees no CUDA device")
    device = torch.device("cuda", 0)
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise BackendUnavailable(f"{name} has compute capability {capability[0]}.{capability[1]}; 8.0 is needed")
    return device


def load_flashinfer() -> ModuleType:
    """Import FlashInfer; what it would build and log goes below the user's cache folder unless told otherwise.

    Raises:
        BackendUnavailable: it is not installed, of another version, or cannot be imported here.
    """
    _require_version()
    # A CuTe DSL that happens to be installed would otherwise replace the norm kernels that warm-up has built.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    os.environ.setdefault("FLASHINFER_LOGGING_LEVEL", "warning")
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(_cache_folder()))
    try:
        return importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendUnavailable(f"{_DISTRIBUTION} cannot be imported: {error}") from error


def _require_version() -> None:
    try:
        found = importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError as error:
        raise BackendUnavailable(f"{_DISTRIBUTION} is not installed; `pip install twostroke[gpu]` brings it") from error
    if not OLDEST <= _numbers(found) < BEYOND:
        low, high = (".".join(map(str, each)) for each in (OLDEST, BEYOND))
        raise BackendUnavailable(f"{_DISTRIBUTION} is {found}; from {low} up to {high} is needed")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading whole numbers of a version: (0, 6, 8) of 0.6.8.post1."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twostroke"
