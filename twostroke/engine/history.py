"""What a sequence has said so far, kept so that penalties cost the same at every length."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence


class TokenHistory:
    """The distinct tokens of a sequence in order of first appearance, and how often each was generated.

    Append-only: recording a token is O(1), reading is one copy of at most a vocabulary's worth of integers.
    """

    __slots__ = ("_slots", "counts", "ids")

    def __init__(self, prompt: Iterable[int], generated: Iterable[int]) -> None:
        self._slots = {token: slot for slot, token in enumerate(dict.fromkeys(prompt))}
        self.ids: array[int] = array("q", self._slots)
        self.counts: array[int] = array("q", bytes(8 * len(self.ids)))
        self.extend(generated)

    def extend(self, generated: Iterable[int]) -> None:
        """Record generated tokens."""
        for token in generated:
            slot = self._slots.setdefault(token, len(self.ids))
            if slot == len(self.ids):
                self.ids.append(token)
                self.counts.append(0)
            self.counts[slot] += 1


def history_for(
    prompt: Sequence[int], generated: Sequence[int], *, repetition: bool, repeats: bool
) -> TokenHistory | None:
    """A history of just what the penalties in force look at; None when none is."""
    if repetition:
        return TokenHistory(prompt, generated)
    return TokenHistory((), generated) if repeats else None
