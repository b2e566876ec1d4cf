"""Runs the prompts of one HTTP request through the generator, a few at a time, into one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

from aiohttp import web

from services.router.gateway.answer import Answer
from services.router.gateway.generator import Generator
from twostroke.errors import Internal
from twostroke.types import GenerateRequest, Started

PROMPTS_AT_ONCE = 8


class Relay:
    """One use. The answer begins only when every prompt was found valid, so a bad one still gets its own status."""

    def __init__(self, generator: Generator, answer: Answer, deadline: float) -> None:
        self._generator = generator
        self._answer = answer
        self._deadline = deadline
        self._slots = asyncio.Semaphore(PROMPTS_AT_ONCE)
        self._begun = asyncio.Event()

    async def run(self, requests: Sequence[GenerateRequest]) -> web.StreamResponse:
        """Return the finished response.

        A failed prompt ends the others; so does leaving this call for any reason.
        Raises: TwostrokeError.
        """
        started: dict[int, Started] = {}

        async def one(prompt: int) -> None:
            # Each generator lives in one task from its first event to its close: it may hold timeouts and scopes.
            async with aclosing(self._generator.generate(requests[prompt], self._deadline)) as events:
                async with self._slots:
                    first = await anext(events, None)
                if not isinstance(first, Started):
                    raise Internal("a request did not begin with Started")
                started[prompt] = first
                if len(started) == len(requests):
                    await self._answer.begin([started[each] for each in range(len(requests))])
                    self._begun.set()
                await self._begun.wait()
                async with self._slots:
                    async for event in events:
                        await self._answer.take(prompt, event)

        if len(requests) == 1:
            await one(0)
        else:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for prompt in range(len(requests)):
                        tasks.create_task(one(prompt), name=f"prompt-{prompt}")
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from group
        return await self._answer.end()
