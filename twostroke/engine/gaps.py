"""Logits as sampling sees them: how far each lies below the highest of its row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

_IN_CACHE = 1 << 17  # logits a CPU works on at once: its temporaries, 1 MiB each, stay in a core's cache
_IN_MEMORY = 1 << 25  # logits that any other device does: temporaries of at most 256 MiB


@dataclass(frozen=True, slots=True)
class Gaps:
    """The gaps of P draws, each from a row of logits; several may share a row. They are computed when looked at.

    Attributes:
        logits: float32 [R, V].
        highest: the highest logit of each row, float32 [R].
        rows: the row of each draw, int64 [P].
    """

    logits: Tensor
    highest: Tensor
    rows: Tensor

    @property
    def vocabulary(self) -> int:
        """V, the tokens of a row."""
        return self.logits.shape[1]

    def at(self, draws: Tensor, ids: Tensor) -> Tensor:
        """Gaps of single tokens: float32 [n]."""
        rows = self.rows[draws]
        return self.highest[rows] - self.logits[rows, ids]

    def parts(self, draws: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Some draws with the gaps of all their tokens, a few at a time: int64 [n] and float32 [n, V]."""
        room = _IN_CACHE if self.logits.device.type == "cpu" else _IN_MEMORY
        count = max(1, room // self.vocabulary)
        for start in range(0, len(draws), count):
            part = draws[start : start + count]
            rows = self.rows[part]
            yield part, self.highest[rows, None] - self.logits.index_select(0, rows)
