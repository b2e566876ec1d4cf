"""Rotary position embedding: frequencies, tables and the rotation, in the half-rotation layout."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from twostroke.engine.config import RopeConfig, RopeScaling


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return radians per position for each pair of dimensions, float32 [head_dim / 2].

    Source: arXiv:2104.09864; scaling as published with Llama 3.1 (`apply_scaling`).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.scaling is RopeScaling.LINEAR:
        frequencies = frequencies / rope.factor
    elif rope.scaling is RopeScaling.LLAMA3:
        frequencies = _llama3(rope, frequencies)
    if rope.divisors is not None:
        frequencies = frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
    return frequencies


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    share = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - share) * frequencies / rope.factor + share * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, between)
    return torch.where(wavelengths < shortest, frequencies, stretched)


def rotation(frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each position's angles: two float32 [T, 1, head_dim / 2], for int64 positions [T]."""
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head [T, heads, head_dim] by its position: pair i is dimensions i and i + head_dim / 2."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
