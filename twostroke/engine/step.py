"""One forward pass as integers: which tokens of which sequences run together."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.engine.sequence import Sequence
from twostroke.errors import TwostrokeError


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence; one token when it decodes, more when it reads its prompt."""

    sequence: Sequence
    start: int  # position of the first
    count: int
    samples: bool  # whether these are the last tokens it has, so that the next one follows

    @classmethod
    def of(cls, sequence: Sequence, most: int) -> Chunk:
        """The next tokens of a sequence, at most `most` of them."""
        count = min(sequence.remaining, most)
        return cls(sequence, sequence.computed, count, count == sequence.remaining)


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A shared tail that a sequence will write into, and the page that becomes its own copy."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A waiting sequence that was turned away when its turn came."""

    sequence: Sequence
    error: TwostrokeError


@dataclass(frozen=True, slots=True)
class Step:
    """What the engine does next: the copies, in order, and then all chunks in one pass."""

    chunks: tuple[Chunk, ...]  # decodes first
    copies: tuple[PageCopy, ...] = ()
    refusals: tuple[Refusal, ...] = ()
