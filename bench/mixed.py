"""What a long prompt does to running streams: eight of them decode, a prompt of 6,000 tokens arrives.

This is the load that separate prefill and decode workers are for. A pause is the time between two chunks of a stream,
as its reader sees it; a gap is the time between two tokens: a pause before several tokens, spread over them. The pauses
are what is held to the aim, since they cannot hide a stall behind the tokens that follow it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from bench.client import Answer, Arrival, BadAnswer, Prompts, Target
from bench.contenders import LONG_PROMPT, Contender, line_up, ours, serving
from bench.figures import Figures, Ratio
from bench.loads import OTHERS, STREAM_PROMPT_TOKENS, warn_if_disturbed
from bench.processes import run_to_end
from bench.record import Record, add_shared
from twostroke.engine.backends.choice import Device, choose_backend
from twostroke.engine.matrix import WeightMode

STREAMS = 8
RUNNING_TOKENS = 8  # of each stream: by then none waits for another's prompt any more
IDLE_TOKENS = 64  # of each stream, before the long prompt is sent
MOST_TOKENS = 1_900  # of each stream; all are left before that

IDLE, DURING = "p99 pause idle, ms", "p99 pause during, ms"
IDLE_GAP, DURING_GAP = "p99 token gap idle, ms", "p99 token gap during, ms"
LONG = "long prompt's first token, s"
GROWTH = "during / idle"
AIM = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How often to do it.

    Attributes:
        length: of the long prompt, tokens.
        rounds: of ours.
        peer_rounds: of those, with peers.
        seconds: that all may take.
    """

    length: int
    rounds: int
    peer_rounds: int
    seconds: float


FULL = Plan(length=6_000, rounds=5, peer_rounds=1, seconds=600.0)
QUICK = Plan(length=2_000, rounds=1, peer_rounds=1, seconds=140.0)


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


def pauses(answers: Sequence[Answer], since: float, until: float) -> tuple[list[float], list[float]]:
    """Seconds between chunks, and between tokens, of all streams, that overlap a time."""
    chunks = [gap for answer in answers for gap in answer.chunk_gaps(since, until)]
    return chunks, [gap for answer in answers for gap in answer.token_gaps(since, until)]


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


async def disturb(contender: Contender, length: int, prompts: Prompts) -> AsyncGenerator[tuple[str, float], None]:
    """Start a server, run the streams, send the long prompt; yield figures with their names.

    Raises:
        DidNotServe, BadAnswer: as a visit does.
    """
    async with serving(contender) as server:
        target = server.target
        await target.answer(prompts.take(64), 8)  # warms up
        async with running(target, prompts) as streams:
            since = max(stream.answer.time_of(RUNNING_TOKENS) for stream in streams)
            sent, before = target.clock(), [stream.answer for stream in streams]
            long = await target.answer(prompts.take(length), 1)
            until, answers = target.clock(), [stream.answer for stream in streams]
        yield OTHERS, server.spawned.others_cores()
    idle, idle_gaps = pauses(before, since, sent)
    during, during_gaps = pauses(answers, sent, until)
    yield IDLE, 1e3 * p99(idle)
    yield DURING, 1e3 * p99(during)
    yield IDLE_GAP, 1e3 * p99(idle_gaps)
    yield DURING_GAP, 1e3 * p99(during_gaps)
    yield GROWTH, p99(during) / p99(idle)
    yield LONG, long.first_seconds


async def rounds(record: Record, contenders: Sequence[Contender], plan: Plan) -> None:
    """Disturb each in turn, peers in the first rounds only."""
    deadline = time.monotonic() + plan.seconds
    for round_ in range(plan.rounds):
        for contender in contenders:
            if contender.is_ours or round_ < plan.peer_rounds:
                print(f"mixed load, round {round_ + 1} of {plan.rounds}: {contender.name}", flush=True)
                await record.take(contender, disturb(contender, plan.length, Prompts(seed=round_)), deadline)


def show(figures: Figures, names: Sequence[str], length: int) -> None:
    """A table of medians."""
    print(f"\n{STREAMS} streams decode, a prompt of {length} tokens arrives:")
    figures.print_medians(names, (IDLE, DURING, GROWTH, IDLE_GAP, DURING_GAP, LONG, OTHERS))
    warn_if_disturbed(figures)


def ratios(figures: Figures, ours_names: Sequence[str]) -> dict[str, Ratio]:
    """How much a long prompt lengthens our longest pauses, in each mode."""
    found = {f"mixed load, p99 pause during / idle, {who}": figures.median(who, GROWTH) for who in ours_names}
    return {name: Ratio(value, AIM, "lower") for name, value in found.items() if value is not None}


async def run(record: Record, only: Sequence[str], *, quick: bool) -> None:
    """Measure ourselves and the peers that are here, and print a table."""
    plan = QUICK if quick else FULL
    contenders, left_out = line_up((WeightMode.F16,), LONG_PROMPT, only)
    for name, why in left_out.items():
        record.leave_out(name, why)
    await rounds(record, contenders, plan)
    show(record.figures, [each.name for each in contenders], plan.length)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round and a shorter prompt, in three minutes")
    add_shared(parser)
    told = parser.parse_args()
    mine = ours(WeightMode.F16).name
    record = Record("mixed", choose_backend(Device.CPU).name, told.out, lambda figures: ratios(figures, [mine]))
    run_to_end(run(record, told.only, quick=told.quick))
    record.finish()


if __name__ == "__main__":
    main()
