"""A heartbeat for a sequence that may be silent for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from twostroke.engine.outputs import StepOutput


async def with_pulse(outputs: AsyncIterator[StepOutput], seconds: float) -> AsyncGenerator[StepOutput | None, None]:
    """Yield the outputs, and None whenever `seconds` went by without one.

    An engine's stream takes an output only when it hands it over, so a wait that is given up loses nothing.
    """
    while True:
        try:
            async with asyncio.timeout(seconds):
                output = await anext(outputs, None)
        except TimeoutError:
            yield None
            continue
        if output is None:
            return
        yield output
