"""The loads that every server gets: prompts alone, streams together. One visit starts a server, loads it, ends it."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from bench.client import Prompts, Target, steady_rate
from bench.contenders import Contender, serving
from bench.figures import Figures
from bench.quiet import MOST_CORES

STREAM_PROMPT_TOKENS = 16
REPEATED_UP_TO = 1_024  # prompts of at most so many tokens are timed three times a visit


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """What to measure.

    Attributes:
        rounds: visits to each server.
        prompts: lengths, tokens.
        streams: how many at once.
        new_tokens: of each stream.
        seconds: that all visits and what comes before them may take.
    """

    rounds: int
    prompts: tuple[int, ...]
    streams: tuple[int, ...]
    new_tokens: int
    seconds: float


FULL = Loads(rounds=3, prompts=(256, 1_024, 4_096), streams=(1, 4, 8, 16, 32), new_tokens=96, seconds=1_500.0)
QUICK = Loads(rounds=1, prompts=(256, 1_024), streams=(1, 8), new_tokens=48, seconds=140.0)


def first_ms(length: int) -> str:
    """Name of the figure: milliseconds to the first token of a prompt of so many tokens."""
    return f"first token of {length}, ms"


def prefill_rate(length: int) -> str:
    """Name of the figure: prompt tokens a second, from the time to the first token."""
    return f"prefill {length}, tok/s"


def decode_rate(streams: int) -> str:
    """Name of the figure: tokens a second of so many streams together."""
    return f"decode B={streams}, tok/s"


START = "start, s"
MEMORY = "peak memory, MB"
OTHERS = "busy with others, cores"


async def visit(contender: Contender, loads: Loads, prompts: Prompts) -> AsyncGenerator[tuple[str, float], None]:
    """Start a server, put every load on it once, and end it; yield each figure with its name as soon as it is there.

    Raises:
        DidNotServe: the server did not start.
        BadAnswer: an answer cannot be measured.
    """
    async with serving(contender) as server:
        yield START, server.start_seconds
        await server.target.answer(prompts.take(64), 8)  # warms up
        for length in loads.prompts:
            seconds = await _first_seconds(server.target, length, prompts)
            yield first_ms(length), 1e3 * seconds
            yield prefill_rate(length), length / seconds
        for streams in loads.streams:
            yield decode_rate(streams), await _together(server.target, streams, loads.new_tokens, prompts)
        yield MEMORY, server.spawned.peak_bytes / 1e6
        yield OTHERS, server.spawned.others_cores()


def others_cores(figures: Figures) -> float:
    """Cores that worked for others, in the most disturbed visit."""
    return max((max(each.get(OTHERS, [0.0])) for each in figures.raw().values()), default=0.0)


def warn_if_disturbed(figures: Figures) -> None:
    """Say so where the machine had other things to do."""
    if (most := others_cores(figures)) > MOST_CORES:
        print(f"\nNOT QUIET: other processes kept up to {most:.1f} cores busy; compare nothing, run it again alone")


async def _first_seconds(target: Target, length: int, prompts: Prompts) -> float:
    times = 3 if length <= REPEATED_UP_TO else 1
    answers = [await target.answer(prompts.take(length), 1) for _ in range(times)]
    return statistics.median(answer.first_seconds for answer in answers)


async def _together(target: Target, streams: int, new_tokens: int, prompts: Prompts) -> float:
    async with asyncio.TaskGroup() as tasks:
        asked = [
            tasks.create_task(target.answer(prompts.take(STREAM_PROMPT_TOKENS), new_tokens)) for _ in range(streams)
        ]
    return steady_rate([task.result() for task in asked])
