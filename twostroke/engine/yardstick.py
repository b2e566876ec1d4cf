"""Measures loaded models against one of them, on one text: both in memory, the text window by window."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from twostroke.engine.passages import Passages
from twostroke.engine.quality import Cost, Likeness, Tally, likeness
from twostroke.engine.reading import Reader, continued
from twostroke.engine.weights import LoadedModel
from twostroke.errors import InvalidRequest

ANSWER_TOKENS = 64  # of each greedy answer
_PASS_TOKENS = 512  # of one forward pass
_ROWS = 64  # of logits in memory at once, for each model

Tell = Callable[[str, int, int], None]  # what is being done, how far it is, and how far it goes


class Yardstick:
    """A reference model with its answers.

    Args:
        reference: stays in memory beside whatever is measured.
        passages: what both read.
        tell: hears of progress after each forward pass.
    """

    def __init__(self, reference: LoadedModel, passages: Passages, tell: Tell) -> None:
        self._reference = reference
        self._passages = passages
        self._tell = tell
        self._answers = self._answered(reference)

    def measure(self, other: LoadedModel) -> tuple[Cost, Likeness]:
        """Compare a model of the same vocabulary with the reference.

        Raises:
            InvalidRequest: the vocabularies differ in size, or the passages hold fewer than two tokens to score.
            ModelError: a model's scores are no numbers.
        """
        if other.config.vocab_size != self._reference.config.vocab_size:
            raise InvalidRequest("models of different vocabularies cannot be compared", field="model")
        tally, total, read = Tally(), self._passages.tokens, 0
        for window in self._passages.windows:
            for count in _scored(self._reference, other, window, tally):
                read += count
                self._tell(f"{other.mode} reads", read, total)
        return tally.cost(), likeness(self._answers, self._answered(other))

    def _answered(self, loaded: LoadedModel) -> tuple[tuple[int, ...], ...]:
        def tell(count: int) -> None:
            self._tell(f"{loaded.mode} answers", count, ANSWER_TOKENS)

        return continued(loaded, self._passages.prompts, ANSWER_TOKENS, tell)


def _scored(reference: LoadedModel, other: LoadedModel, window: Sequence[int], tally: Tally) -> Iterator[int]:
    """Score a window by both models into `tally`, a pass at a time; yields how many tokens each pass read."""
    readers = [Reader(loaded, sequences=1, tokens=len(window)) for loaded in (reference, other)]
    targets = torch.tensor(window[1:])
    for start in range(0, len(window), _PASS_TOKENS):
        piece = window[start : start + _PASS_TOKENS]
        hidden = [reader.read([piece]) for reader in readers]
        came = targets[start : start + len(piece)]  # the very last token has none after it
        for first in range(0, len(came), _ROWS):
            rows = slice(first, min(first + _ROWS, len(came)))
            told, found = (reader.logits(each[rows]) for reader, each in zip(readers, hidden, strict=True))
            tally.add(told, found, came[rows])
        yield len(piece)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let each of torch's operations use `count` threads for the length of the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
