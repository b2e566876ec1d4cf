"""What a long prompt does to running streams: eight of them decode, a prompt of 6,000 tokens arrives.

This is the load that separate prefill and decode workers are for. A pause is the time between two chunks of a stream,
as its reader sees it; a gap is the time between two tokens: a pause before several tokens, spread over them. The pauses
are what is held to the aim, since they cannot hide a stall behind the tokens that follow it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from bench.client import Answer, Arrival, BadAnswer, Prompts, Target
from bench.contenders import LONG_PROMPT, Contender, ours, peers, serving
from bench.figures import Figures, Ratio, emit, print_ratios
from bench.loads import OTHERS, STREAM_PROMPT_TOKENS, others_cores, warn_if_disturbed
from bench.processes import DidNotServe, run_to_end
from twostroke.engine.matrix import WeightMode

STREAMS = 8
LONG_TOKENS = 6_000
QUICK_TOKENS = 2_000
RUNNING_TOKENS = 8  # of each stream: by then none waits for another's prompt any more
IDLE_TOKENS = 64  # of each stream, before the long prompt is sent
MOST_TOKENS = 1_900  # of each stream; all are left before that

IDLE, DURING = "p99 pause idle, ms", "p99 pause during, ms"
IDLE_GAP, DURING_GAP = "p99 token gap idle, ms", "p99 token gap during, ms"
LONG = "long prompt's first token, s"
GROWTH = "during / idle"
AIM = 2.0


@dataclass(slots=True)
class Stream:
    """One stream that runs until it is left."""

    began: float
    arrivals: list[Arrival] = field(default_factory=list)
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, target: Target, prompt: Sequence[int]) -> None:
        """Take chunks until cancelled."""
        async with aclosing(target.arrivals(prompt, MOST_TOKENS)) as arrivals:
            async for arrival in arrivals:
                self.arrivals.append(arrival)
                if arrival.tokens > IDLE_TOKENS:
                    self.settled.set()
        raise BadAnswer(f"a stream ended after {MOST_TOKENS} tokens, before the long prompt was answered")

    @property
    def answer(self) -> Answer:
        """What has come by now."""
        return Answer(self.began, tuple(self.arrivals))


def p99(values: Sequence[float]) -> float:
    """The value that one in a hundred exceeds."""
    return statistics.quantiles(values, n=100, method="inclusive")[98]


@asynccontextmanager
async def running(target: Target, prompts: Prompts) -> AsyncIterator[list[Stream]]:
    """Streams that decode for the length of the block; on entry each has shown its idle gaps."""
    streams = [Stream(target.clock()) for _ in range(STREAMS)]
    async with asyncio.TaskGroup() as tasks:
        tasks_ = [tasks.create_task(stream.run(target, prompts.take(STREAM_PROMPT_TOKENS))) for stream in streams]
        for stream in streams:
            await stream.settled.wait()
        yield streams
        for task in tasks_:
            task.cancel()


async def disturb(contender: Contender, length: int, prompts: Prompts) -> Mapping[str, float]:
    """Start a server, run the streams, send the long prompt; figures by name.

    Raises:
        DidNotServe, BadAnswer: as a visit does.
    """
    async with serving(contender) as server:
        target = server.target
        await target.answer(prompts.take(64), 8)  # warms up
        async with running(target, prompts) as streams:
            since = max(stream.answer.time_of(RUNNING_TOKENS) for stream in streams)
            sent = target.clock()
            long = await target.answer(prompts.take(length), 1)
            until = target.clock()
            answers = [stream.answer for stream in streams]
            others = server.spawned.others_cores()
    idle = [pause for answer in answers for pause in answer.chunk_gaps(since, sent)]
    during = [pause for answer in answers for pause in answer.chunk_gaps(sent, until)]
    idle_gaps = [gap for answer in answers for gap in answer.token_gaps(since, sent)]
    during_gaps = [gap for answer in answers for gap in answer.token_gaps(sent, until)]
    return {
        IDLE: 1e3 * p99(idle),
        DURING: 1e3 * p99(during),
        IDLE_GAP: 1e3 * p99(idle_gaps),
        DURING_GAP: 1e3 * p99(during_gaps),
        GROWTH: p99(during) / p99(idle),
        LONG: long.first_seconds,
        OTHERS: others,
    }


async def measure(contenders: Sequence[Contender], rounds: int, peer_rounds: int, length: int) -> Figures:
    """Disturb each in turn, peers in the first rounds only."""
    figures = Figures()
    for round_ in range(rounds):
        for contender in contenders:
            if not contender.is_ours and round_ >= peer_rounds:
                continue
            print(f"mixed load, round {round_ + 1} of {rounds}: {contender.name}", flush=True)
            try:
                figures.add(contender.name, await disturb(contender, length, Prompts(seed=round_)))
            except* (DidNotServe, BadAnswer, aiohttp.ClientError) as failed:
                print(f"  not measured: {failed.exceptions[0]}", flush=True)
    return figures


def show(figures: Figures, names: Sequence[str], length: int) -> None:
    """A table of medians."""
    print(f"\n{STREAMS} streams decode, a prompt of {length} tokens arrives:")
    figures.print_medians(names, (IDLE, DURING, GROWTH, IDLE_GAP, DURING_GAP, LONG, OTHERS))
    warn_if_disturbed(figures)


def ratios(figures: Figures, ours_names: Sequence[str]) -> dict[str, Ratio]:
    """How much a long prompt lengthens our longest pauses, in each mode."""
    found = {f"mixed load, p99 pause during / idle, {who}": figures.median(who, GROWTH) for who in ours_names}
    return {name: Ratio(value, AIM, "lower") for name, value in found.items() if value is not None}


async def run(*, quick: bool) -> tuple[Figures, dict[str, Ratio]]:
    """Measure ourselves and the peers that are here, print, and answer the figures."""
    present, absent = peers(LONG_PROMPT)
    for name in absent:
        print(f"{name} is not here: `make peers` sets it up")
    mine = ours(WeightMode.F16)
    length = QUICK_TOKENS if quick else LONG_TOKENS
    contenders = (mine, *(each for each in present if not (quick and each.name.startswith("vllm"))))
    figures = await measure(contenders, 1 if quick else 5, 1, length)
    show(figures, [each.name for each in contenders], length)
    return figures, ratios(figures, [mine.name])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, a shorter prompt, without vLLM")
    parser.add_argument("--out", type=Path, help="file to write the result to")
    told = parser.parse_args()
    figures, found = run_to_end(run(quick=told.quick))
    print_ratios(found)
    emit("mixed", found, told.out, figures, others_cores=round(others_cores(figures), 2))


if __name__ == "__main__":
    main()
