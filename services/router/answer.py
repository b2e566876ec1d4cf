"""The answer to one request while it is made: choices gather tokens, the caller takes events at its own pace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from twostroke.text.stops import TextStream
from twostroke.text.tokenizer import Tokenizer
from twostroke.types import ChoiceFinished, Delta, FinishReason, Token


class Choice:
    """One choice: what exists of it, and what the caller has not yet been sent.

    Attributes:
        emitted: ids of all tokens that count; overshoot past a stop string is dropped.
        finish: why it ended; None while it goes on.
    """

    def __init__(self, index: int, tokenizer: Tokenizer, stop_strings: Sequence[str], *, min_tokens: int = 0) -> None:
        self.index = index
        self.emitted: list[int] = []
        self.finish: FinishReason | None = None
        self._stream = TextStream(tokenizer, stop_strings, min_tokens=min_tokens)
        self._text: list[str] = []
        self._tokens: list[Token] = []
        self._sequence = 0
        self._told = False

    def push(self, tokens: Sequence[Token], finish: FinishReason | None) -> None:
        """Take tokens in, and the reason if they are the last ones."""
        if self.finish is not None:
            return
        delta = self._stream.push([token.id for token in tokens])
        used = tokens[: delta.tokens_used]
        self.emitted.extend(token.id for token in used)
        self._tokens.extend(used)
        self._text.append(delta.text)
        self.finish = FinishReason.STOP if delta.stopped else finish
        if self.finish is not None and not delta.stopped:
            rest = self._stream.finish()
            self._text.append(rest.text)
            if rest.stopped:
                self.finish = FinishReason.STOP

    def take(self) -> list[Delta | ChoiceFinished]:
        """What the caller was not yet sent."""
        events: list[Delta | ChoiceFinished] = []
        text = "".join(self._text)
        if text or self._tokens:
            self._sequence += 1
            events.append(
                Delta(
                    choice=self.index,
                    sequence=self._sequence,
                    text=text,
                    tokens=tuple(self._tokens),
                    total_tokens=len(self.emitted),
                )
            )
            self._text, self._tokens = [], []
        if self.finish is not None and not self._told:
            self._told = True
            events.append(ChoiceFinished(self.index, self.finish))
        return events


class Answer:
    """All choices of a request. What gathers is bounded by their max_tokens."""

    def __init__(self, choices: int, tokenizer: Tokenizer, stop_strings: Sequence[str], *, min_tokens: int = 0) -> None:
        self.choices = [Choice(index, tokenizer, stop_strings, min_tokens=min_tokens) for index in range(choices)]
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(len(choice.emitted) for choice in self.choices)

    @property
    def open(self) -> list[Choice]:
        """Choices that have not ended."""
        return [choice for choice in self.choices if choice.finish is None]

    def push(self, choice: Choice, tokens: Sequence[Token], finish: FinishReason | None) -> None:
        """Take tokens of one choice in."""
        choice.push(tokens, finish)
        self._changed.set()

    def close(self) -> None:
        """Nothing more will come."""
        self._closed = True
        self._changed.set()

    async def events(self) -> AsyncIterator[Delta | ChoiceFinished]:
        """Yield what gathers, until the answer is closed and all was taken."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            closed = self._closed
            for choice in self.choices:
                for event in choice.take():
                    yield event
            if closed:
                return
