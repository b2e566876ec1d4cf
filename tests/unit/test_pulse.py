"""The heartbeat of a sequence that is silent: it comes while nothing else does, and costs no output."""

from __future__ import annotations

import asyncio

from tests.support.engines import Fragile, asked, engine_of
from twostroke.engine.outputs import StepOutput
from twostroke.worker.pulse import with_pulse


async def test_a_pulse_comes_while_a_step_is_silent_and_no_output_is_lost() -> None:
    model = Fragile()
    async with engine_of(model) as engine, engine.submit(asked([model.WAITS], max_tokens=5)) as outputs:
        assert await asyncio.to_thread(model.entered.wait, 30)
        pulses, told = 0, []
        async for output in with_pulse(outputs, 0.01):
            if output is not None:
                told.append(output)
                continue
            pulses += 1
            if pulses == 3:
                model.gate.set()
        assert pulses >= 3
        assert len(StepOutput.merged(told).tokens) == 5
