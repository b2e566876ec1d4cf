"""Rotary position embedding: frequencies and turns, in the half-rotation layout."""

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


def rotation(frequencies: Tensor, positions: Tensor) -> Tensor:
    """Return each position's turn, for int64 positions [T]: float32 [T, head_dim], cosines, then sines."""
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
