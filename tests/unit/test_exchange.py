"""The border between the event loop and an engine thread that does not come back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from tests.support.paper import CONTEXT, END, PAGE_TOKENS, VOCAB, Paper, paper_request
from twostroke.engine.core import EngineCore
from twostroke.engine.exchange import Exchange
from twostroke.engine.sequence import Sequence
from twostroke.engine.settings import EngineSettings
from twostroke.engine.step import Step
from twostroke.engine.stream import Stream
from twostroke.engine.validation import Bounds
from twostroke.errors import Unavailable
from twostroke.types import Token


class Hanging(Paper):
    """Arithmetic on paper that does not begin before the gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.gate = threading.Event()

    def run(self, step: Step) -> Mapping[Sequence, tuple[Token, ...]]:
        self.entered.set()
        self.gate.wait(30)
        return super().run(step)


@asynccontextmanager
async def hanging() -> AsyncIterator[tuple[Exchange, Stream]]:
    """An exchange whose thread hangs in a step; afterwards the thread has come back and ended."""
    runner = Hanging()
    bounds = Bounds(vocab_size=VOCAB, context=CONTEXT, page_tokens=PAGE_TOKENS, pages=8)
    before = set(threading.enumerate())
    exchange = Exchange(EngineCore(EngineSettings(pages=9), bounds, frozenset({END}), runner), torch_threads=1)
    exchange.start()
    (thread,) = set(threading.enumerate()) - before
    stream = Stream()
    exchange.connect(0, stream)
    exchange.do(lambda core: core.submit(0, paper_request([1, 2])))
    assert await asyncio.to_thread(runner.entered.wait, 30)
    try:
        yield exchange, stream
    finally:
        runner.gate.set()
        await asyncio.to_thread(thread.join, 30)
    assert not thread.is_alive()


async def test_closing_leaves_a_step_that_hangs_behind_and_tells_everyone() -> None:
    async with hanging() as (exchange, stream):
        asking = exchange.ask(lambda core: core.cached_blocks([]))
        await exchange.close(0.0)
        with pytest.raises(Unavailable):
            await asking
        with pytest.raises(Unavailable):
            await anext(stream)
        with pytest.raises(Unavailable):
            exchange.require_running()
        with pytest.raises(Unavailable):
            await exchange.idle()


async def test_what_a_step_brings_after_the_end_reaches_nobody() -> None:
    async with hanging() as (exchange, stream):
        await exchange.close(0.0)
    await asyncio.sleep(0)  # the thread's last calls are carried out
    assert stream.ended
    with pytest.raises(Unavailable):
        await anext(stream)


async def test_each_caller_gets_an_error_of_its_own() -> None:
    async with hanging() as (exchange, _):
        await exchange.close(0.0)
        errors = []
        for _ in range(2):
            with pytest.raises(Unavailable) as raised:
                exchange.require_running()
            errors.append(raised.value)
    assert errors[0] is not errors[1]
