"""Kernels for every shape that later stages use: compiled, or found from before."""

from __future__ import annotations

import time

import torch

from bench.gpu.findings import Finding
from bench.gpu.ground import Ground
from bench.gpu.shapes import SHAPES, Heads, attention_shape
from twostroke.engine.backend import Activation
from twostroke.engine.cuda.kernels import build, needed


def run(ground: Ground) -> None:
    """Build all at the same time."""
    if ground.emulated:
        ground.notes.fact("kernels", "emulated")
        return
    ground.backend()  # imports FlashInfer with its settings
    wanted: list[tuple[Heads, tuple[int | None, ...], torch.dtype]]
    wanted = [(heads, (None,), torch.bfloat16) for heads in SHAPES]
    wanted += [(SHAPES[0], (100,), torch.bfloat16), (SHAPES[0], (None,), torch.float16)]
    specs = {
        spec.name: spec
        for heads, windows, dtype in wanted
        for activation in Activation
        for spec in needed(attention_shape(heads, windows=windows), dtype, activation)
    }
    missing = [spec for spec in specs.values() if not spec.is_compiled]
    ground.notes.fact("modules, compiled before", f"{len(specs) - len(missing)} of {len(specs)}")
    began = time.perf_counter()
    if missing:
        build(
            missing,
            lambda spec: ground.notes.add(Finding(f"built {spec.name[:50]}", time.perf_counter() - began, "s")),
        )
    ground.notes.add(Finding("all modules", time.perf_counter() - began, "s", at_most=120.0))
