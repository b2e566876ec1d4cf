"""What differs between devices, behind one protocol: a model asks its backend for arithmetic and looks no further."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from twostroke.engine.attention import AttentionBackend, AttentionShape
    from twostroke.engine.cache import KvCache
    from twostroke.engine.matrix import Matrix


class Activation(enum.StrEnum):
    """What the gate of a feed-forward passes through."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"  # the tanh approximation of GELU


class Linear(Protocol):
    """A matrix [N, K], and its bias if it has one, ready to be multiplied with."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [T, K] times the matrix, plus the bias: [T, N]."""

    def add_to(self, into: Tensor, x: Tensor) -> None:
        """Add the same to `into` [T, N], in place."""


class Embedding(Protocol):
    """A vocabulary's vectors."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Look up int64 [T]: fresh memory [T, hidden], in the dtype that the backend computes in."""


class Backend(Protocol):
    """Arithmetic on one device. Activations are [T, ...] tensors on `device` in `dtype`; sums are float32 everywhere.

    Methods take and return tensors on the device; `placed`, `linear`, `embedding` and `vector` bring weights there.
    """

    name: str
    device: torch.device
    dtype: torch.dtype  # of activations
    torch_threads: int  # torch's intra-op threads in a pass

    def placed(self, matrix: Matrix) -> Matrix:
        """Bring a matrix to where `linear` and `embedding` want it, so that both can be made of one."""

    def linear(self, matrix: Matrix) -> Linear:
        """Prepare a matrix for multiplication."""

    def embedding(self, matrix: Matrix) -> Embedding:
        """Prepare a matrix to look rows up in."""

    def vector(self, values: Tensor) -> Tensor:
        """Bring a norm's weights (float32 [n]) to where `rms_norm` wants them."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Divide each vector of x by its root mean square and scale by weight [n] (arXiv:1910.07467).

        x is [T, n] or [T, H, n]; there may be gaps between tokens, and nowhere else.
        """

    def add(self, into: Tensor, more: Tensor) -> None:
        """Add [T, n] to `into` [T, n], in place; neither has gaps."""

    def rotate(self, heads: Tensor, rotation: Tensor) -> None:
        """Rotate heads [T, H, D] in place; rotation is float32 [T, D]: cosines [D / 2], then sines."""

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up for gate_up [T, 2 n]: [T, n]."""

    def attention(self, cache: KvCache, shape: AttentionShape) -> AttentionBackend:
        """Attend over the pages of `cache`."""
