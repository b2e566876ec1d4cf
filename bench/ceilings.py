"""What this machine can do at best: bytes read and sums made a second, and what follows for this model.

Decode of one stream reads every matrix once a token, so the rate of reading bounds it. Prefill multiplies them with
many rows, so the rate of matrix products bounds it. A product of float32 is the plain yardstick; where bfloat16 is much
faster, three of its products make one that is as good as float16 weights deserve, and that is the bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from twostroke.engine.backend import Backend
from twostroke.engine.config import ModelConfig
from twostroke.engine.matrix import WeightMode, stored

READ_BYTES = 512 << 20
GEMM_SIDE = 2_048
_BYTES = {WeightMode.F32: 4, WeightMode.F16: 2, WeightMode.BF16: 2, WeightMode.INT8: 1}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates of this machine; lists are by number of threads, one first."""

    read_gb: tuple[float, ...]  # 1e9 bytes a second
    gemm_f32: tuple[float, ...]  # 1e9 multiplications and additions a second, counted apart; so are the next two
    gemm_bf16: tuple[float, ...]
    gemm_int8: tuple[float, ...]


def measure(threads: int) -> Ceilings:
    """Measure with one and with `threads` threads; takes a few seconds, and 0.5 GB for a moment."""
    buffer = torch.ones(READ_BYTES // 4)
    rows, ones = buffer.view(-1, 1_024), torch.ones(1_024)
    a, b = torch.randn(2, GEMM_SIDE, GEMM_SIDE)
    a_bf16, b_bf16 = a.bfloat16(), b.bfloat16()
    a_int8, b_int8 = (10 * a).to(torch.int8), (10 * b).to(torch.int8)
    operations = 2 * GEMM_SIDE**3 / 1e9
    counts = sorted({1, threads})
    reads = (buffer.sum, lambda: buffer.dot(buffer), lambda: rows @ ones)  # whichever keeps up best with the memory
    return Ceilings(
        read_gb=tuple(map(max, zip(*(_each(counts, read, READ_BYTES / 1e9) for read in reads), strict=True))),
        gemm_f32=_each(counts, lambda: a @ b, operations),
        gemm_bf16=_each(counts, lambda: a_bf16 @ b_bf16, operations),
        gemm_int8=_each(counts, lambda: torch._int_mm(a_int8, b_int8), operations),
    )


def weights_gb(backend: Backend, config: ModelConfig, mode: WeightMode) -> float:
    """1e9 bytes a second at which our own kernel reads for one row: several heads in turn, as large as the model."""
    head = config.vocab_size * config.hidden_size * _BYTES[mode]
    count = -(-matrix_bytes(config, mode) // head)
    matrix = stored("head", torch.randn(config.vocab_size, config.hidden_size), mode)
    linears, row = [backend.linear(matrix) for _ in range(count)], torch.randn(1, config.hidden_size)
    return _rate(lambda: [linear(row) for linear in linears], count * head / 1e9, tries=10)


def matrix_values(config: ModelConfig) -> tuple[int, int]:
    """Numbers in all matrices of the layers, and in the head."""
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * query + 2 * kv + 3 * config.intermediate_size)
    return config.num_layers * layer, config.vocab_size * config.hidden_size


def matrix_bytes(config: ModelConfig, mode: WeightMode) -> int:
    """Bytes that a token reads of the matrices, the head included."""
    return sum(matrix_values(config)) * _BYTES[mode]


def decode_operations(config: ModelConfig) -> float:
    """Multiplications and additions of a token: matrices and head; attention to a short context is left out."""
    return 2.0 * sum(matrix_values(config))


def prefill_operations(config: ModelConfig, length: int) -> float:
    """Multiplications and additions of a prompt: matrices, causal attention, and the head for its last token."""
    layers, head = matrix_values(config)
    attention = 2 * 2 * config.num_layers * config.num_heads * config.head_dim * length * (length + 1) / 2
    return 2.0 * layers * length + 2.0 * head + attention


def _each(counts: list[int], work: Callable[[], object], amount: float) -> tuple[float, ...]:
    before, rates = torch.get_num_threads(), []
    try:
        for count in counts:
            torch.set_num_threads(count)
            rates.append(_rate(work, amount, tries=7))
    finally:
        torch.set_num_threads(before)
    return tuple(rates)


def _rate(work: Callable[[], object], amount: float, tries: int) -> float:
    """The best of several, as a ceiling should be."""
    work()
    seconds = []
    for _ in range(tries):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return amount / min(seconds)
