"""The names of what numbers are kept in, apart from their arithmetic: what is told one need not load torch."""

from __future__ import annotations

import enum


class WeightMode(enum.StrEnum):
    """The values behind the matrices. Vectors (norms, biases) are float32 in every mode."""

    F32 = "f32"  # as the file has them
    F16 = "f16"  # rounded once to float16
    BF16 = "bf16"  # rounded once to bfloat16
    INT8 = "int8"  # rounded once to 255 steps between plus and minus the largest of the row


class KvMode(enum.StrEnum):
    """The numbers that stand for keys and values in pages, in blocks and on their way between workers."""

    AUTO = "auto"  # f32 beside weights in f32, else 16 bits: f16 on a CPU, those of activations on a GPU
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
