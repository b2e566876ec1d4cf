"""The two forms of an answer: streamed as it is made, or whole at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aiohttp import web

from services.router.gateway.draft import Draft, Form
from services.router.gateway.json_text import encode
from services.router.gateway.parse import Asked
from services.router.gateway.sse import EventStream
from twostroke.errors import Internal
from twostroke.types import ChoiceFinished, Delta, Event, Started, Usage


class Answer(Protocol):
    """Takes what the generator says, for all prompts of one HTTP request."""

    async def begin(self, started: Sequence[Started]) -> None:
        """Every prompt was found valid."""

    async def take(self, prompt: int, event: Event) -> None:
        """One event of one prompt. Waits while the client is behind."""

    async def end(self) -> web.StreamResponse:
        """All events came; the response is complete after this."""


class WholeAnswer:
    """One JSON object."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    async def begin(self, started: Sequence[Started]) -> None:
        """Note models, seeds and prompt lengths."""
        self._draft.begin(started)

    async def take(self, prompt: int, event: Event) -> None:
        """Keep it."""
        match event:
            case Delta():
                self._draft.add(prompt, event).text.append(event.text)
            case ChoiceFinished():
                self._draft.finish(prompt, event)
            case Usage():
                self._draft.count(event)
            case Started():
                raise Internal("a request started twice")

    async def end(self) -> web.StreamResponse:
        """The object."""
        self._draft.check_complete()
        body = encode(self._draft.whole())
        return web.Response(body=body, content_type="application/json", headers=self._draft.headers)


class StreamedAnswer:
    """Server-sent events: deltas that are never empty, one chunk with a finish reason per choice, then [DONE]."""

    def __init__(self, draft: Draft, form: Form, asked: Asked, events: EventStream) -> None:
        self._draft = draft
        self._form = form
        self._asked = asked
        self._events = events

    async def begin(self, started: Sequence[Started]) -> None:
        """Open the stream, and every choice."""
        self._draft.begin(started)
        await self._events.open(self._draft.headers)
        opening = self._form.opening()
        if opening is None:
            return
        for choice in self._draft.choices:
            await self._events.send(self._draft.chunk([self._draft.choice_json(choice, opening)]))

    async def take(self, prompt: int, event: Event) -> None:
        """Send it, if there is something to show; log-probabilities wait for the text they belong to."""
        match event:
            case Delta():
                choice = self._draft.add(prompt, event)
                if event.text:
                    piece = self._draft.choice_json(choice, self._form.piece(event.text))
                    await self._events.send(self._draft.chunk([piece]))
            case ChoiceFinished():
                choice = self._draft.finish(prompt, event)
                closing = self._draft.choice_json(choice, self._form.closing())
                await self._events.send(self._draft.chunk([closing]))
            case Usage():
                self._draft.count(event)
            case Started():
                raise Internal("a request started twice")

    async def end(self) -> web.StreamResponse:
        """The usage, where it was asked for, and [DONE]."""
        self._draft.check_complete()
        if self._asked.usage_at_end:
            await self._events.send(self._draft.last_chunk())
        await self._events.done()
        return self._events.response()
