"""Builds FlashInfer's kernels for a model before anybody waits for them; what was built once is found again.

Each module is built in its own folder below the cache, all at the same time. The package's own batch build leaves no
trace there, so that the first use would build everything again.
"""

from __future__ import annotations

import importlib
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from twostroke.engine.attention import AttentionShape
from twostroke.engine.attention.wrappers import BACKEND
from twostroke.engine.backend import Activation, Backend
from twostroke.engine.config import ModelConfig
from twostroke.errors import BackendUnavailable, UnsupportedModel

HEAD_DIMS = (64, 128, 256)  # FlashInfer builds others, and computes something else
_GATES = {Activation.SILU: "silu", Activation.GELU_TANH: "gelu_tanh"}
_NO_ROTATION = 0  # keys are rotated before they are stored

Spec = Any  # flashinfer.jit.core.JitSpec


def prepare_kernels(backend: Backend, config: ModelConfig, tell: Callable[[str], None]) -> None:
    """Build what a model on a GPU needs and is not there yet: a minute or two the first time. Elsewhere, nothing.

    Several processes may do so at once: each module is built by one, and the others wait for it.

    Raises:
        UnsupportedModel: FlashInfer has no kernels for the model's heads.
        BackendUnavailable: the compiler is missing, or failed.
    """
    if backend.device.type != "cuda":
        return
    specs = list(needed(config.attention, backend.dtype, Activation(config.activation)))
    missing = [spec for spec in specs if not spec.is_compiled]
    if not missing:
        return
    tell(f"compiling {len(missing)} of {len(specs)} kernel modules")
    began = time.perf_counter()
    build(missing, lambda spec: tell(f"compiled {spec.name} after {time.perf_counter() - began:.0f} s"))


def needed(shape: AttentionShape, dtype: torch.dtype, activation: Activation) -> Iterator[Spec]:
    """Describe the modules that a model of this shape calls.

    Raises:
        UnsupportedModel: FlashInfer has no kernels for its heads.
    """
    if shape.head_dim not in HEAD_DIMS:
        raise UnsupportedModel(f"heads of {shape.head_dim} dimensions do not run on a GPU, only {HEAD_DIMS}")
    jit = importlib.import_module("flashinfer.jit")
    for windowed in sorted({window is not None for window in shape.windows}):
        yield jit.gen_batch_prefill_module(
            BACKEND,
            *(dtype, dtype, dtype, torch.int32),
            *(shape.head_dim, shape.head_dim),
            _NO_ROTATION,
            windowed,
            False,  # no soft cap on scores
            False,  # sums of scores in float32
        )
    for name in ("page", "rope", "norm"):
        yield getattr(importlib.import_module(f"flashinfer.jit.{name}"), f"gen_{name}_module")()
    yield importlib.import_module("flashinfer.jit.activation").gen_act_and_mul_module(_GATES[activation])


def build(specs: list[Spec], built: Callable[[Spec], None]) -> None:
    """Build modules, all at once; `built` hears of each.

    Raises:
        BackendUnavailable: the compiler is missing, or failed; its own words are in the message.
    """
    with ThreadPoolExecutor(len(specs), thread_name_prefix="build-kernels") as threads:
        builds = [(spec, threads.submit(spec.build, verbose=False)) for spec in specs]
        for spec, running in builds:
            try:
                running.result()
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                raise BackendUnavailable(f"{spec.name} could not be compiled: {_words(error)}") from error
            built(spec)


def _words(error: Exception) -> str:
    """Return the compiler's first complaint, or what else the error says."""
    lines = str(error).splitlines()
    complaints = [line for line in lines if "error" in line.lower()]
    return next(iter(complaints or lines), type(error).__name__)
