"""Arithmetic on a GPU: cuBLAS for matrices, FlashInfer for what lies between them, torch where FlashInfer does not fit.

Weights and activations have the dtype of the mode, and every sum is float32. Where a kernel of FlashInfer would round a
norm's weights or a bias that the mode keeps in float32, torch computes instead.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu, linear, rms_norm, silu

from twostroke.engine.attention import AttentionShape
from twostroke.engine.attention.flashinfer import FlashInferAttention
from twostroke.engine.backend import Activation, Embedding, Linear
from twostroke.engine.cache import KvCache
from twostroke.engine.cuda.package import load_flashinfer, require_device
from twostroke.engine.matrix import Matrix, WeightMode
from twostroke.errors import BackendUnavailable

_DTYPES = {WeightMode.BF16: torch.bfloat16, WeightMode.F16: torch.float16}
_VECTOR_BYTES = 16  # what FlashInfer's activation kernels load at once


def open_flashinfer(mode: WeightMode) -> FlashInferBackend:
    """Return the backend of this machine's GPU for weights in `mode`.

    Raises:
        BackendUnavailable: there is no GPU, no FlashInfer, or a GPU does not compute with this mode.
    """
    device = require_device()
    if mode not in _DTYPES:
        names = " or ".join(each.value for each in _DTYPES)
        raise BackendUnavailable(f"a GPU does not compute with weights in {mode.value}: use --weights {names}")
    package = load_flashinfer()
    # Both are for the whole process: sums over a split K would otherwise be rounded to 16 bits on the way.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return FlashInferBackend(package, device, _DTYPES[mode])


class FlashInferBackend:
    """A Backend on a CUDA device.

    Args:
        package: FlashInfer.
        device: where to compute.
        dtype: of weights and activations.
    """

    name = "flashinfer"
    torch_threads = 1  # the host only launches

    def __init__(self, package: ModuleType, device: torch.device, dtype: torch.dtype) -> None:
        self._package = package
        self.device, self.dtype = device, dtype

    def placed(self, matrix: Matrix) -> Matrix:
        """Bring a matrix to the device."""
        return replace(matrix, values=matrix.values.to(self.device))

    def linear(self, matrix: Matrix) -> Linear:
        """Prepare a matrix on the device."""
        bias = None if matrix.bias is None else self.vector(matrix.bias)
        return _DeviceLinear(self.placed(matrix).values, bias)

    def embedding(self, matrix: Matrix) -> Embedding:
        """Prepare a matrix on the device."""
        return _DeviceRows(self.placed(matrix).values)

    def vector(self, values: Tensor) -> Tensor:
        """Bring a vector to the device, in the dtype of activations if that changes no value, else in float32."""
        narrow = values.to(self.dtype)
        return (narrow if torch.equal(narrow.to(values.dtype), values) else values).to(self.device)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Normalize the last dimension of x [T, n] or [T, H, n]."""
        if weight.dtype != x.dtype:
            return rms_norm(x.float(), weight.shape, weight, epsilon).to(x.dtype)
        normed: Tensor = self._package.rmsnorm(x, weight, epsilon, enable_pdl=False)
        return normed

    def add(self, into: Tensor, more: Tensor) -> None:
        """Add in place."""
        into.add_(more)

    def rotate(self, heads: Tensor, rotation: Tensor) -> None:
        """Rotate in place, by a table that has a row for each token instead of one for each position."""
        tokens, _, size = heads.shape
        rows = torch.arange(tokens, dtype=torch.int32, device=self.device)
        keys = heads.new_empty((tokens, 1, size))  # the kernel wants some beside queries; nobody reads these
        self._package.apply_rope_with_cos_sin_cache_inplace(rows, heads, keys, size, rotation, is_neox=True)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Apply the activation to the first half and multiply by the second."""
        if gate_up.shape[-1] // 2 * gate_up.itemsize % _VECTOR_BYTES:
            gate, up = gate_up.chunk(2, dim=-1)
            return (silu(gate) if activation is Activation.SILU else gelu(gate, approximate="tanh")) * up
        package = self._package
        fused = package.silu_and_mul if activation is Activation.SILU else package.gelu_tanh_and_mul
        product: Tensor = fused(gate_up, enable_pdl=False)
        return product

    def attention(self, cache: KvCache, shape: AttentionShape) -> FlashInferAttention:
        """Attend by FlashInfer."""
        return FlashInferAttention(self._package, cache, shape, self.dtype)


class _DeviceLinear:
    """A matrix in the dtype of activations; sums are float32 and rounded once."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._transposed = weight, weight.t()
        fused = bias is None or bias.dtype == weight.dtype
        self._bias = bias if fused else None
        self._late = None if fused else bias

    def __call__(self, x: Tensor) -> Tensor:
        product = linear(x, self._weight, self._bias)
        return product if self._late is None else product.add_(self._late)

    def add_to(self, into: Tensor, x: Tensor) -> None:
        into.addmm_(x, self._transposed)
        for bias in (self._bias, self._late):
            if bias is not None:
                into.add_(bias)


class _DeviceRows:
    """Embeddings in the dtype of activations."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        return embedding(token_ids, self._weight)
