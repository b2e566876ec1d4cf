"""Steps of an engine in this process: how they grow with the context, what the host adds, and where a second goes."""

from __future__ import annotations

import asyncio
import cProfile
import pstats
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path

from bench.client import Prompts
from tests.support.tiny import write_tiny
from twostroke.engine.backends.choice import Device, choose_backend
from twostroke.engine.engine import Engine, EngineRequest, EngineSettings
from twostroke.engine.weights import LoadedModel, WeightMode, load_model
from twostroke.kv.keys import root_key
from twostroke.types import SamplingParams, StopConditions

ENGINE_THREAD = "engine"
PAGE_TOKENS = 16
TIMED_STEPS = 24
HOST_STEPS = 200
PROFILED_LINES = 16


def request(engine: Engine, prompt: Sequence[int], max_tokens: int) -> EngineRequest:
    """A greedy answer of exactly so many tokens."""
    return EngineRequest(
        id="bench",
        prompt=tuple(prompt),
        root=root_key(engine.format.digest, "bench"),
        sampling=SamplingParams(temperature=0.0),
        stops=StopConditions(max_tokens=max_tokens, ignore_eos=True),
    )


@asynccontextmanager
async def engine_for(loaded: LoadedModel, tokens: int) -> AsyncIterator[Engine]:
    """An engine with pages for so many tokens."""
    settings = EngineSettings(pages=tokens // PAGE_TOKENS + 2)
    async with Engine.start(settings, loaded.model, loaded.kv_format(block_tokens=PAGE_TOKENS)) as engine:
        yield engine


async def step_ms(engine: Engine, prompt: list[int]) -> float:
    """Median milliseconds of a decode step of one stream behind `prompt`."""
    came: list[float] = []
    async with engine.submit(request(engine, prompt, TIMED_STEPS)) as outputs:
        async for output in outputs:
            came += [time.perf_counter()] * len(output.tokens)
    return 1e3 * statistics.median(after - before for before, after in pairwise(came[1:]))


async def by_context(loaded: LoadedModel, contexts: tuple[int, ...]) -> dict[int, float]:
    """Milliseconds of a step at each context, in tokens."""
    prompts = Prompts(seed=0)
    async with engine_for(loaded, max(contexts) + TIMED_STEPS) as engine:
        return {context: await step_ms(engine, prompts.take(context)) for context in contexts}


async def batch_step_ms(engine: Engine, rows: int, prompts: list[list[int]], steps: int) -> float:
    """Milliseconds of a step that has so many rows, over about so many steps."""

    async def one(prompt: list[int]) -> None:
        async with engine.submit(request(engine, prompt, steps + 1)) as outputs:
            async for _ in outputs:
                pass

    before, began = engine.load().steps, time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for prompt in prompts[:rows]:
            tasks.create_task(one(prompt))
    await engine.idle()
    return 1e3 * (time.perf_counter() - began) / (engine.load().steps - before)


async def host_ms(loaded: LoadedModel, batches: tuple[int, ...]) -> dict[int, float]:
    """Milliseconds of a step at each batch, with a model so small that the host's share is nearly all of it."""
    found = {}
    async with engine_for(loaded, 32 * (HOST_STEPS + PAGE_TOKENS)) as engine:
        for batch in batches:
            prompts = [[batch, row, *range(6)] for row in range(batch)]
            found[batch] = await batch_step_ms(engine, batch, prompts, HOST_STEPS)
    return found


def tiny_model() -> LoadedModel:
    """Two layers of 64 numbers: a step costs what the host adds."""
    with tempfile.TemporaryDirectory() as folder:
        return load_model(write_tiny(Path(folder)), mode=WeightMode.F32, backend=choose_backend(Device.CPU))


async def profile(loaded: LoadedModel, rows: int) -> list[str]:
    """Where the engine's thread spends its time while so many streams decode: a table of functions by own time."""
    prompts, profiler = Prompts(seed=1), cProfile.Profile()
    with profiled_threads(profiler):
        async with engine_for(loaded, rows * 64) as engine:
            step = await batch_step_ms(engine, rows, [prompts.take(PAGE_TOKENS) for _ in range(rows)], 24)
    entries: dict[tuple[str, int, str], tuple[int, int, float, float, object]] = vars(pstats.Stats(profiler))["stats"]
    waiting = ("get", "_queue.SimpleQueue")
    shown = {where: row for where, row in entries.items() if not all(word in where[2] for word in waiting)}
    total = sum(own for _, _, own, _, _ in shown.values())
    lines = [f"{step:.1f} ms a step at {rows} rows; own time of {total:.2f} s in the engine's thread:"]
    for (file, line, name), (_, calls, own, _, _) in sorted(shown.items(), key=lambda each: -each[1][2])[
        :PROFILED_LINES
    ]:
        where = f"{Path(file).parent.name}/{Path(file).name}:{line} {name}" if line else name
        lines.append(f"{own / total:7.1%} {calls:8d} calls  {where[:90]}")
    return lines


@contextmanager
def profiled_threads(profiler: cProfile.Profile) -> Iterator[None]:
    """Profile the engine's thread, if it starts within the block."""

    def enable(*_: object) -> None:
        sys.setprofile(None)  # for this thread: asked once
        if threading.current_thread().name == ENGINE_THREAD:
            profiler.enable()

    threading.setprofile(enable)
    try:
        yield
    finally:
        threading.setprofile(None)
