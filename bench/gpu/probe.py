"""Versions, and the ceilings that other stages are measured against: copies and matrix products."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from bench.gpu.findings import Finding
from bench.gpu.ground import Ground

COPY, PRODUCT = "device copy, read and written", "bf16 product"
_PACKAGES = ("torch", "flashinfer-python", "apache-tvm-ffi", "transformers", "grpcio", "numpy")


def run(ground: Ground) -> None:
    """Look around, then measure."""
    notes = ground.notes
    notes.fact("python", platform.python_version())
    for name in _PACKAGES:
        try:
            notes.fact(name, version(name))
        except PackageNotFoundError:
            notes.fact(name, "absent")
    notes.fact("device", "a CPU that plays one" if ground.emulated else torch.cuda.get_device_name(ground.device))
    if not ground.emulated:
        free, total = torch.cuda.mem_get_info(ground.device)
        notes.fact("device memory, free of all", f"{free / 1e9:.1f} of {total / 1e9:.1f} GB")
    notes.add(Finding(COPY, copy_rate(ground) / 1e9, "GB/s"))
    notes.add(Finding(PRODUCT, product_rate(ground) / 1e12, "TFLOP/s"))


def copy_rate(ground: Ground) -> float:
    """Bytes a second that a copy within the device reads and writes."""
    source = torch.empty(ground.size(4 << 30, 1 << 20), dtype=torch.uint8, device=ground.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / ground.seconds(lambda: target.copy_(source))


def product_rate(ground: Ground) -> float:
    """Operations a second of a large product of random matrices: zeros would be faster."""
    size = ground.size(8_192, 64)
    left, right = (torch.randn(size, size, device=ground.device).bfloat16() for _ in range(2))
    return 2 * size**3 / ground.seconds(lambda: left @ right)
