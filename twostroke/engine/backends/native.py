"""Arithmetic by our own kernels on a CPU: float32 sums over weights that are read as they are stored.

Few tokens are bound by reading the weights: a kernel reads each once, as it is stored, with no padding. Many tokens are
bound by arithmetic: they go to AMX tiles where the processor has them, else to BLAS over weights widened to float32.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from twostroke.engine.attention import AttentionBackend, AttentionShape
from twostroke.engine.attention.native import NativeAttention, can_attend
from twostroke.engine.backend import Activation, Linear
from twostroke.engine.backends.torch import TorchBackend
from twostroke.engine.cache import KvCache
from twostroke.engine.matrix import Matrix
from twostroke.engine.native.library import BFLOAT, HALF, INT8, CMatrix, Library
from twostroke.engine.native.memory import HugePages

_KINDS = {torch.float16: HALF, torch.bfloat16: BFLOAT, torch.int8: INT8}
_BLAS_PAYS = 48  # tokens from which float32 BLAS beats our vectors, where there are no tiles


class NativeLinear:
    """A matrix as it is stored, in huge pages: its own, or those of a file that workers share."""

    def __init__(self, matrix: Matrix, library: Library, threads: int) -> None:
        self._matrix, self._library, self._threads = matrix, library, threads
        self._rows, columns = matrix.values.shape
        described = CMatrix(
            values=matrix.values.data_ptr(),
            scales=None if matrix.scales is None else matrix.scales.data_ptr(),
            bias=None if matrix.bias is None else matrix.bias.data_ptr(),
            rows=self._rows,
            columns=columns,
            kind=_KINDS[matrix.values.dtype],
        )
        self._described, self._address = described, ctypes.addressof(described)

    def __call__(self, x: Tensor) -> Tensor:
        """Return float32 [T, N]."""
        out = x.new_empty((x.shape[0], self._rows))
        self._multiply(x, out, add=False)
        return out

    def add_to(self, into: Tensor, x: Tensor) -> None:
        """Add the product to `into` [T, N]."""
        self._multiply(x, into, add=True)

    def _multiply(self, x: Tensor, out: Tensor, *, add: bool) -> None:
        tokens = x.shape[0]
        if tokens >= _BLAS_PAYS and not self._library.has_tiles:
            product = linear(x, self._matrix.dense(), self._matrix.bias)
            out.add_(product) if add else out.copy_(product)
            return
        self._library.linear(self._address, x.data_ptr(), x.stride(0), out.data_ptr(), tokens, add, self._threads)


class NativeBackend(TorchBackend):
    """A Backend in float32 on the CPU; matrices of mode f32 stay with BLAS.

    Attributes:
        library: the kernels.
        on_tiles: whether chunks attend on AMX tiles, which keep 16 bits of a number, as packed matrices do.

    Args:
        library: the kernels.
        threads: of one operation.
        exact: keep all bits of float32 in attention too, as mode f32 does in its products.
    """

    name = "native"

    def __init__(self, library: Library, *, threads: int, exact: bool = False) -> None:
        super().__init__(packs=False, threads=1)  # torch's would wait for each other where ours step aside
        self.library = library
        self._threads = threads
        self.on_tiles = library.has_tiles and not exact
        self._memory = HugePages()

    def placed(self, matrix: Matrix) -> Matrix:
        """Copy a matrix into huge pages, unless it is in some or stays with BLAS."""
        if matrix.in_huge_pages or matrix.values.dtype == torch.float32:
            return matrix
        return replace(matrix, values=self._memory.place(matrix.values), in_huge_pages=True)

    def linear(self, matrix: Matrix) -> Linear:
        """Prepare a matrix."""
        if matrix.values.dtype == torch.float32:
            return super().linear(matrix)
        return NativeLinear(self.placed(matrix), self.library, self._threads)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Normalize the last dimension."""
        out, size = torch.empty(x.shape), x.shape[-1]
        group = 1 if x.dim() == 2 else x.shape[1]  # vectors side by side
        self.library.rms_norm(
            *(x.data_ptr(), x.stride(0), group, weight.data_ptr(), epsilon),
            *(out.data_ptr(), x.numel() // size, size, self._threads),
        )
        return out

    def add(self, into: Tensor, more: Tensor) -> None:
        """Add in place."""
        self.library.add(into.data_ptr(), more.data_ptr(), into.numel())

    def rotate(self, heads: Tensor, rotation: Tensor) -> None:
        """Rotate in place."""
        tokens, count, size = heads.shape
        self.library.rotate(heads.data_ptr(), heads.stride(0), tokens, count, size, rotation.data_ptr(), self._threads)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Apply the activation to the first half and multiply by the second."""
        tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((tokens, size))
        gelu = activation is Activation.GELU_TANH
        self.library.gated(gate_up.data_ptr(), out.data_ptr(), tokens, size, gelu, self._threads)
        return out

    def attention(self, cache: KvCache, shape: AttentionShape) -> AttentionBackend:
        """Attend over pages in place, or by torch where the heads have an odd form."""
        if can_attend(shape):
            return NativeAttention(cache, shape, self.library, self._threads, tiles=self.on_tiles)
        return super().attention(cache, shape)
