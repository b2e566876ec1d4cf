"""The caller's end of one sequence: outputs gather here until they are taken."""

from __future__ import annotations

import asyncio

from twostroke.engine.outputs import StepOutput
from twostroke.errors import TwostrokeError


class Stream:
    """An asynchronous iterator of StepOutput for one consumer; it lives on the event loop.

    A slow consumer gets several steps as one output. What may gather is bounded by the request's own `max_tokens`.
    """

    def __init__(self) -> None:
        self._gathered: list[StepOutput] = []
        self._error: TwostrokeError | None = None
        self._changed = asyncio.Event()
        self.ended = False  # nothing more will come in

    def push(self, output: StepOutput, *, last: bool) -> None:
        """Add an output."""
        self._gathered.append(output)
        self.ended = last
        self._changed.set()

    def fail(self, error: TwostrokeError) -> None:
        """End with an error, raised once everything before it was taken."""
        self._error = error
        self.ended = True
        self._changed.set()

    def discard(self) -> list[int]:
        """Drop what was not taken; returns the pages that were lent with it."""
        pages = [block.page for output in self._gathered for block in output.filled]
        self._gathered.clear()
        return pages

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> StepOutput:
        while not self._gathered:
            if self._error is not None:
                raise self._error
            if self.ended:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        output = StepOutput.merged(self._gathered)
        self._gathered.clear()
        return output
