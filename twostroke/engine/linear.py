"""Matrix products with a model's weights, and how each weight mode holds them.

A mode names values, not kernels: two processes in the same mode compute with the same numbers, whatever their kernels.
"""

from __future__ import annotations

import enum
import logging
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from twostroke.errors import ModelError

_log = logging.getLogger(__name__)
_HALF_MAX = 65_504.0
_PACKING_ENGINES = ("fbgemm", "x86")


class WeightMode(enum.StrEnum):
    """The values behind the matrices. Vectors (norms, biases) are float32 in every mode."""

    F32 = "f32"  # as the file has them
    F16 = "f16"  # rounded once to float16; products and sums stay in float32


class Linear(Protocol):
    """A matrix [N, K] ready to be multiplied with."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [T, K] times the matrix, plus the bias: float32 [T, N]."""


class DenseLinear:
    """A float32 matrix as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return float32 [T, N]."""
        return linear(x, self._weight, self._bias)


class PackedHalfLinear:
    """A float16 matrix in FBGEMM's layout: half the bytes to read, sums in float32.

    Packing rounds to nearest, ties to even, as `Tensor.half` does. The layout pads K to a multiple of 512. On few rows
    it is up to four times as fast as float32, on many rows about equal, so it serves all.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Return float32 [T, N]."""
        product: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return product


def has_packed_kernels() -> bool:
    """Say whether this build of torch packs float16 matrices: FBGEMM is there on x86, not on ARM."""
    return torch.backends.quantized.engine in _PACKING_ENGINES


class LinearFactory:
    """Makes every matrix of one model in one mode, packed where `packs` says that this processor has kernels for it."""

    def __init__(self, mode: WeightMode, *, packs: bool) -> None:
        self.mode = mode
        self._packs = packs
        if mode is WeightMode.F16 and not packs:
            _log.warning("no packed float16 kernels here: float32 kernels run on the rounded weights")

    def linear(self, name: str, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Prepare float32 `weight` [N, K] for multiplication; the caller may drop it afterwards.

        Raises:
            ModelError: a value is too large for the mode; `name` is told.
        """
        if self.mode is WeightMode.F32:
            return DenseLinear(weight, bias)
        _require_half_range(name, weight)
        return PackedHalfLinear(weight, bias) if self._packs else DenseLinear(weight.half().float(), bias)

    def embedding(self, name: str, weight: Tensor) -> Tensor:
        """Return float32 `weight` [vocab, hidden] with the mode's values, to look rows up in; raises as `linear`."""
        if self.mode is WeightMode.F32:
            return weight
        _require_half_range(name, weight)
        return weight.half()


def _require_half_range(name: str, weight: Tensor) -> None:
    low, high = weight.aminmax()
    if max(-low.item(), high.item()) > _HALF_MAX:
        raise ModelError(f"tensor {name} has values beyond float16; load this model in mode f32")
