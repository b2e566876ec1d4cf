"""Arithmetic by torch's own kernels on a CPU: what runs where nothing can be compiled, and what the rest is held to."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu, linear, rms_norm, silu

from twostroke.engine.attention import AttentionBackend, AttentionShape
from twostroke.engine.attention.torch import TorchAttention
from twostroke.engine.backend import Activation, Embedding, Linear
from twostroke.engine.cache import KvCache
from twostroke.engine.matrix import Matrix

_PACKING_ENGINES = ("fbgemm", "x86")


class DenseLinear:
    """A float32 matrix, multiplied by BLAS."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return float32 [T, N]."""
        return linear(x, self._weight, self._bias)

    def add_to(self, into: Tensor, x: Tensor) -> None:
        """Add the product to `into` [T, N]."""
        into += self(x)


class PackedHalfLinear:
    """A float16 matrix in FBGEMM's layout: half the bytes to read, sums in float32.

    The layout pads K to a multiple of 512. On few rows it is up to four times as fast as float32, on many rows about
    equal, so it serves all.
    """

    def __init__(self, matrix: Matrix) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(matrix.dense(), matrix.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Return float32 [T, N]."""
        product: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return product

    def add_to(self, into: Tensor, x: Tensor) -> None:
        """Add the product to `into` [T, N]."""
        into += self(x)


def has_packed_kernels() -> bool:
    """Say whether this build of torch packs float16 matrices: FBGEMM is there on x86, not on ARM."""
    return torch.backends.quantized.engine in _PACKING_ENGINES


class _Rows:
    """Embeddings, kept as their mode stores them."""

    def __init__(self, matrix: Matrix) -> None:
        self._values, self._scales = matrix.values, matrix.scales

    def __call__(self, token_ids: Tensor) -> Tensor:
        rows = embedding(token_ids, self._values)
        if self._scales is None:
            return rows.float()
        return rows.float() * self._scales[token_ids].unsqueeze(1)


class TorchBackend:
    """A Backend in float32 on the CPU.

    Args:
        packs: whether float16 matrices are packed for FBGEMM; otherwise float32 kernels run on the rounded values.
        threads: of one operation; they wait for each other, so more than one pays only on a machine without neighbours.
    """

    name = "torch"
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, *, packs: bool, threads: int = 1) -> None:
        self._packs = packs
        self.torch_threads = threads

    def placed(self, matrix: Matrix) -> Matrix:
        """Return the matrix as it is."""
        return matrix

    def linear(self, matrix: Matrix) -> Linear:
        """Prepare a matrix: packed when it is float16, else dense float32."""
        if matrix.values.dtype == torch.float16 and self._packs:
            return PackedHalfLinear(matrix)
        return DenseLinear(matrix.dense(), matrix.bias)

    def embedding(self, matrix: Matrix) -> Embedding:
        """Keep the rows as they are stored."""
        return _Rows(matrix)

    def vector(self, values: Tensor) -> Tensor:
        """Return the values as they are."""
        return values

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Normalize the last dimension."""
        return rms_norm(x, weight.shape, weight, epsilon)

    def add(self, into: Tensor, more: Tensor) -> None:
        """Add in place."""
        into.add_(more)

    def rotate(self, heads: Tensor, rotation: Tensor) -> None:
        """Rotate in place: pair i is dimensions i and i + D / 2."""
        cos, sin = rotation.unsqueeze(1).chunk(2, dim=-1)
        first, second = heads.chunk(2, dim=-1)
        rotated = first * cos - second * sin, second * cos + first * sin
        first.copy_(rotated[0])
        second.copy_(rotated[1])

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Apply the activation to the first half and multiply by the second."""
        gate, up = gate_up.chunk(2, dim=-1)
        return (silu(gate) if activation is Activation.SILU else gelu(gate, approximate="tanh")) * up

    def attention(self, cache: KvCache, shape: AttentionShape) -> AttentionBackend:
        """Attend by scaled_dot_product_attention."""
        return TorchAttention(cache, shape)
