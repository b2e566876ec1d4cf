"""The names of weight modes, apart from their arithmetic: what is told a mode need not load torch."""

from __future__ import annotations

import enum


class WeightMode(enum.StrEnum):
    """The values behind the matrices. Vectors (norms, biases) are float32 in every mode."""

    F32 = "f32"  # as the file has them
    F16 = "f16"  # rounded once to float16
    BF16 = "bf16"  # rounded once to bfloat16
    INT8 = "int8"  # rounded once to 255 steps between plus and minus the largest of the row
