"""Stop strings: end a stream at the first one, and show no part of it.

The first is the one that is complete first; of two that end with the same character it is the longer, which starts
earlier. So an answer ends with the character that completes a stop string, whatever pieces it comes in, and never
waits to see whether a longer one would have matched. One that is complete within the first `min_tokens` tokens is
ordinary text, as an end token there would have been banned; one that only begins there counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.errors import InvalidRequest
from twostroke.text.detokenizer import Detokenizer
from twostroke.text.tokenizer import Tokenizer


class StopMatcher:
    """Passes text on up to a stop string, holding back only an end that could still become one."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """Watch for `stops`; with `include` the one that matched is passed on as well.

        Raises: InvalidRequest, if one is empty.
        """
        if not all(stops):
            raise InvalidRequest("a stop string cannot be empty", field="stop")
        self._stops = tuple(stops)
        self._include = include
        self._longest_held = max(map(len, stops), default=1) - 1
        self._held = ""
        self.stopped = False

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """The text that may be shown now; nothing more once `stopped`. Unless it `may_stop`, `text` completes none."""
        if self.stopped:
            return ""
        before = len(self._held)
        text = self._held + text
        if may_stop and (match := self._first(text, before)) is not None:
            start, end = match
            self.stopped, self._held = True, ""
            return text[: end if self._include else start]
        shown = len(text) - self._open_tail(text)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """What was held back, now that nothing can complete it."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, before: int) -> tuple[int, int] | None:
        """Start and end of the stop string that is complete first in `text`, beyond the characters seen `before`."""
        starts = ((text.find(stop, max(0, before + 1 - len(stop))), len(stop)) for stop in self._stops)
        ends = [(start + length, start) for start, length in starts if start >= 0]
        if not ends:
            return None
        end, start = min(ends)
        return start, end

    def _open_tail(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest_held, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What tokens added to the text of one choice."""

    text: str  # may be empty: nothing can be shown yet
    stopped: bool  # a stop string ended the choice, now or before
    tokens_used: int  # of those given, up to the one that completed the stop string; the rest is overshoot


class TextStream:
    """The text of one choice: token ids in, text out that may be shown, until a stop string ends it."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, min_tokens: int = 0, include_stop: bool = False
    ) -> None:
        """Start after a prompt; the first `min_tokens` tokens complete no stop string.

        Raises: InvalidRequest, if a stop string is empty.
        """
        self._detokenizer = Detokenizer(tokenizer, after_text=True)
        self._matcher = StopMatcher(stops, include=include_stop)
        self._unstoppable = min_tokens  # how many of the next tokens

    def push(self, ids: Sequence[int]) -> TextDelta:
        """Take the next tokens; those after the stop string are not looked at."""
        pieces: list[str] = []
        for used, id_ in enumerate(ids):
            if self._matcher.stopped:
                return TextDelta("".join(pieces), True, used)
            text = self._detokenizer.push([id_])
            pieces.append(self._matcher.push(text, may_stop=self._unstoppable == 0))
            self._unstoppable = max(0, self._unstoppable - 1)
        return TextDelta("".join(pieces), self._matcher.stopped, len(ids))

    def finish(self) -> TextDelta:
        """Show what is left at the end of the answer, whatever ended it."""
        if self._matcher.stopped:
            return TextDelta("", True, 0)
        text = self._matcher.push(self._detokenizer.finish(), may_stop=self._unstoppable == 0)
        return TextDelta(text + self._matcher.finish(), self._matcher.stopped, 0)
