"""The parts a model is built from: fused matrices in the values of a mode, and vectors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from twostroke.engine.loading.checkpoint import Checkpoint
from twostroke.engine.matrix import Matrix, WeightMode, stored

_LAYERS_AT_ONCE = 2  # reading, rounding and packing release the interpreter lock

_T = TypeVar("_T")


class Parts(Protocol):
    """Where a model family takes its weights from, by Hugging Face names.

    Raises:
        ModelError: from `matrix` and `vector`, a tensor is missing, misshapen, not finite or too large for the mode.
    """

    def has(self, name: str) -> bool:
        """Say whether the model holds tensor `name`."""

    def matrix(self, *pieces: tuple[str, int], columns: int, bias: bool = False) -> Matrix:
        """Stack matrices that are multiplied with the same input; (name without `.weight`, rows) each.

        With `bias`, each has one, `name`.bias.
        """

    def vector(self, name: str, size: int) -> Tensor:
        """Return tensor `name`: float32 [size]."""

    def layers(self, build: Callable[[int], _T], count: int) -> tuple[_T, ...]:
        """Build `count` layers, a few at a time; the first failure cancels the rest."""


class CheckpointParts:
    """Parts read from a model's own files and rounded to `mode`."""

    def __init__(self, checkpoint: Checkpoint, mode: WeightMode) -> None:
        self._checkpoint, self._mode = checkpoint, mode

    def has(self, name: str) -> bool:
        """Say whether the files hold `name`."""
        return self._checkpoint.has(name)

    def matrix(self, *pieces: tuple[str, int], columns: int, bias: bool = False) -> Matrix:
        """Read, stack and round."""
        weights = [self._checkpoint.take(f"{name}.weight", rows, columns) for name, rows in pieces]
        biases = [self._checkpoint.take(f"{name}.bias", rows) for name, rows in pieces] if bias else []
        return stored(pieces[0][0], torch.cat(weights), self._mode, torch.cat(biases) if biases else None)

    def vector(self, name: str, size: int) -> Tensor:
        """Read one tensor."""
        return self._checkpoint.take(name, size)

    def layers(self, build: Callable[[int], _T], count: int) -> tuple[_T, ...]:
        """Build on a few threads."""
        return on_threads(build, count)


def on_threads(build: Callable[[int], _T], count: int) -> tuple[_T, ...]:
    """Call `build` with 0 to `count` - 1 on a few threads; the first failure cancels the rest."""
    with ThreadPoolExecutor(_LAYERS_AT_ONCE, thread_name_prefix="load-model") as threads:
        building = [threads.submit(build, index) for index in range(count)]
        try:
            return tuple(each.result() for each in building)
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
