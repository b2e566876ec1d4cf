"""A model's tensors by their Hugging Face names, whatever file they lie in; and the account of what was read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from twostroke.errors import ModelError


class TensorSource(Protocol):
    """Files that hold a model's tensors."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor by its Hugging Face name; known harmless extras are left out."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files whose bytes make the values."""

    def read(self, name: str) -> Tensor:
        """Return one tensor as float32, rotary layout and all as Hugging Face has it."""


class Checkpoint:
    """Takes tensors from a source, each with the shape it must have, and holds the loader to account.

    Raises:
        ModelError: from `require` and `take`, a tensor is missing, misshapen or not finite; from `finish`, one was
            not used.
    """

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._unused = set(source.shapes)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor in the files, by name."""
        return self._source.shapes

    def has(self, name: str) -> bool:
        """Say whether the files hold `name`."""
        return name in self._source.shapes

    def require(self, name: str) -> tuple[int, ...]:
        """Return the shape that the files give `name`."""
        found = self._source.shapes.get(name)
        if found is None:
            raise ModelError(f"tensor {name} is missing")
        return found

    def take(self, name: str, *shape: int) -> Tensor:
        """Read one tensor: float32 [*shape], all values finite."""
        found = self.require(name)
        if found != shape:
            raise ModelError(f"tensor {name} has shape {list(found)}; the configuration needs {list(shape)}")
        self._unused.discard(name)
        tensor = self._source.read(name)
        if not all(math.isfinite(extreme) for extreme in torch.stack(tensor.aminmax()).tolist()):  # NaN propagates
            raise ModelError(f"tensor {name} holds NaN or infinite values")
        return tensor

    def finish(self) -> None:
        """Declare that everything needed was taken."""
        if self._unused:
            raise ModelError(f"tensors that no part of the model uses: {', '.join(sorted(self._unused))}")
