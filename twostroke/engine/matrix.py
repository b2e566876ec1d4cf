"""Weight matrices as a mode stores them. A mode names values, not kernels.

Two processes in the same mode compute with the same numbers, whatever their kernels and whatever their device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from twostroke.engine.mode import WeightMode
from twostroke.errors import ModelError

__all__ = ["Matrix", "WeightMode", "stored", "stored_bytes"]

_DTYPES = {
    WeightMode.F32: torch.float32,
    WeightMode.F16: torch.float16,
    WeightMode.BF16: torch.bfloat16,
    WeightMode.INT8: torch.int8,
}
_MOST = 127  # of an int8 value; -128 is left out, so that the range is symmetric
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # below it float32 loses bits, and a quotient is no longer a step


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix [N, K] in the values of one mode, on no particular device; rows are outputs, or tokens of a vocabulary.

    Attributes:
        values: [N, K] in float32, float16, bfloat16 or int8, contiguous.
        scales: float32 [N] with int8, else None; the number at [n, k] is scales[n] * values[n, k].
        bias: float32 [N], or None.
        in_huge_pages: whether `values` lie where a CPU reads them fastest, maybe shared with other processes, so that
            there is nothing to gain from a copy.
    """

    values: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None
    in_huge_pages: bool = False

    def dense(self) -> Tensor:
        """Return the numbers as float32 [N, K]: exactly, but for int8, whose products float32 rounds once."""
        wide = self.values.float()  # a fresh one, unless they are float32
        return wide if self.scales is None else wide.mul_(self.scales.unsqueeze(1))


def stored(name: str, weight: Tensor, mode: WeightMode, bias: Tensor | None = None) -> Matrix:
    """Round float32 `weight` [N, K] to the values of `mode`.

    float16 and bfloat16 round to nearest, ties to even. int8 gives each row the scale (its largest magnitude / 127),
    at least the smallest normal float32, divides by it and rounds likewise; a number is off by half a scale at most.

    Raises:
        ModelError: a value is too large for the mode; `name` is told.
    """
    if mode is WeightMode.INT8:
        return _quantized(name, weight, bias)
    dtype = _DTYPES[mode]
    low, high = weight.aminmax()
    if max(-low.item(), high.item()) > torch.finfo(dtype).max:
        raise _beyond(name, mode)
    return Matrix(weight.to(dtype).contiguous(), bias=bias)


def stored_bytes(shapes: Iterable[Sequence[int]], mode: WeightMode) -> int:
    """Count the bytes of tensors of these shapes in `mode`; kernels may lay them out in more.

    Matrices are stored in the mode's type, with a float32 scale a row in int8; all else is float32.
    """
    each = _DTYPES[mode].itemsize
    scale = torch.float32.itemsize if mode is WeightMode.INT8 else 0
    return sum(
        shape[0] * (shape[1] * each + scale) if len(shape) == 2 else prod(shape) * torch.float32.itemsize
        for shape in shapes
    )


def _quantized(name: str, weight: Tensor, bias: Tensor | None) -> Matrix:
    scales = (weight.abs().amax(dim=1) / _MOST).clamp_min(_LEAST_SCALE)
    if not (scales * _MOST).isfinite().all():  # a scale that was rounded up, at the very end of float32
        raise _beyond(name, WeightMode.INT8)
    steps = (weight / scales.unsqueeze(1)).round().clamp(-_MOST, _MOST)
    return Matrix(steps.to(torch.int8), scales, bias)


def _beyond(name: str, mode: WeightMode) -> ModelError:
    return ModelError(f"tensor {name} has values beyond {mode}; load this model in mode f32")
