"""`make bench-handoff`: what the handoff costs a caller, and what stored blocks save.

Through a cluster that `twostroke up` starts, one request at a time, each prompt new from its first token on:

* the gap between the first token, which prefill sampled, and the second, which decode writes, over the length of the
  prompt, with its parts as the router's metrics tell them: the publish tail (from the first token until the ticket),
  the ticket (until decode is called), and load and admission (until decode has all of it, and its first token);
* the time to the first token of a prompt whose blocks are in the store, at prefill workers that were started anew since
  and have never seen it, beside the time it took cold.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from bench.figures import Ratio, emit, print_ratios, report
from bench.path import cluster
from bench.processes import run_to_end
from twostroke.client import Client
from twostroke.cluster import Role
from twostroke.types import Delta

LENGTHS = (128, 512, 1_024, 3_000)
STORED_TOKENS = 3_000
NEW_TOKENS = 24
ROOM_MS = 10.0  # beside one step of decode
STORED_AIM = 0.1
BACK_SECONDS = 60.0
PARTS = {
    "publish tail": ("computing", "handed_over"),
    "ticket": ("published", "decode_called"),
    "load, admission and one step": ("loading", "admitted"),
}


@dataclass(frozen=True)
class Handed:
    """One answer: seconds to its first token, from there to the second, and between those after it."""

    first: float
    gap: float
    step: float


async def ask(client: Client, prompt: tuple[int, ...]) -> Handed:
    """One greedy answer."""
    began = time.perf_counter()
    events = client.generate(prompt, max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    arrivals = [(time.perf_counter(), event.total_tokens) async for event in events if isinstance(event, Delta)]
    (first, _), (second, have), (last, total) = arrivals[0], arrivals[1], arrivals[-1]
    return Handed(first - began, second - first, (last - second) / (total - have))


async def seconds_in(http: str) -> dict[str, float]:
    """The sums of the router's handoff times so far, by part."""
    async with aiohttp.ClientSession() as session, session.get(f"{http}/metrics") as response:
        lines = (await response.text()).splitlines()
    found = dict.fromkeys(PARTS, 0.0)
    for part, (stage, event) in PARTS.items():
        labels = f'{{event="{event}",stage="{stage}"}}'
        for line in lines:
            if line.startswith(f"twostroke_handoff_seconds_sum{labels}"):
                found[part] = float(line.rpartition(" ")[2])
    return found


async def gaps(client: Client, http: str, rounds: int, dice: random.Random) -> dict[int, dict[str, float]]:
    """Medians in milliseconds, by length of the prompt."""
    rows: dict[int, dict[str, list[float]]] = {length: {} for length in LENGTHS}
    for round_ in range(rounds + 1):
        print(f"round {round_} of {rounds}", file=sys.stderr, flush=True)
        for length in LENGTHS:
            before = await seconds_in(http)
            told = await ask(client, fresh(dice, length))
            after = await seconds_in(http)
            if round_ == 0:  # warms up
                continue
            row = {"gap": told.gap, "step": told.step} | {part: after[part] - before[part] for part in PARTS}
            for what, seconds in row.items():
                rows[length].setdefault(what, []).append(1e3 * seconds)
    return {length: {what: statistics.median(all_) for what, all_ in row.items()} for length, row in rows.items()}


async def stored(client: Client, launcher: int, rounds: int, dice: random.Random) -> tuple[float, float]:
    """Medians of the milliseconds to the first token: cold, and with all blocks stored at workers that are new."""
    cold, warm = [], []
    for round_ in range(rounds):
        print(f"stored, round {round_ + 1} of {rounds}", file=sys.stderr, flush=True)
        prompt = fresh(dice, STORED_TOKENS)
        cold.append((await ask(client, prompt)).first)
        await restarted(client, launcher)
        await ask(client, fresh(dice, 128))  # connections and caches of the new processes
        warm.append((await ask(client, prompt)).first)
    return 1e3 * statistics.median(cold), 1e3 * statistics.median(warm)


async def restarted(client: Client, launcher: int) -> None:
    """Kill every prefill worker, and return when their successors serve."""
    before = await incarnations(client)
    for pid in children(launcher, "services.prefill"):
        os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(BACK_SECONDS):
        while len(now := await incarnations(client)) < len(before) or now & before:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.1)


async def incarnations(client: Client) -> set[str]:
    """Of the prefill workers that take work."""
    workers = (await client.status()).workers
    return {
        each.info.incarnation for each in workers if each.info and each.available and each.info.role is Role.PREFILL
    }


def children(launcher: int, module: str) -> list[int]:
    """Processes of a launcher that run a module."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
            words = status.with_name("cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):  # it ended while we looked
            continue
        if module.encode() in words and int(fields["PPid"]) == launcher:
            found.append(int(status.parent.name))
    return found


def fresh(dice: random.Random, length: int) -> tuple[int, ...]:
    """A prompt that nobody has seen."""
    return tuple(dice.randrange(1_000, 40_000) for _ in range(length))


async def measure(rounds: int, port: int, state: Path) -> dict[str, Ratio]:
    """Run everything; print a table and answer the ratios."""
    dice = random.Random(0)
    async with cluster(port, state) as (_, launcher), Client(f"127.0.0.1:{port + 1}") as client:
        rows = await gaps(client, f"http://127.0.0.1:{port}", rounds, dice)
        cold, warm = await stored(client, launcher, max(1, rounds // 3), dice)
    print(f"{'medians, ms':34}" + "".join(f"{length:>10,}" for length in LENGTHS) + "  tokens of the prompt")
    for what in ("gap", "step", *PARTS):
        print(f"{what:34}" + "".join(f"{rows[length][what]:10.1f}" for length in LENGTHS))
    print(f"first token of {STORED_TOKENS:,} tokens, ms: {cold:.0f} cold, {warm:.0f} from the store at a new worker\n")
    ratios = {
        f"gap after {length} / (step + {ROOM_MS:g} ms)": Ratio(
            rows[length]["gap"] / (rows[length]["step"] + ROOM_MS), 1.0, "lower"
        )
        for length in LENGTHS
    }
    return ratios | {"first token stored / cold": Ratio(warm / cold, STORED_AIM, "lower")}


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="make bench-handoff", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="file for the JSON of the last line")
    parser.add_argument("--port", type=int, default=18_500, help="first of the ports to use")
    parser.add_argument("--state-directory", type=Path, default=Path("/tmp/twostroke-bench"), help="folder for logs")
    told = parser.parse_args()
    ratios = run_to_end(measure(3 if told.quick else told.rounds, told.port, told.state_directory))
    print_ratios(ratios)
    emit(report("handoff", ratios), told.out)


if __name__ == "__main__":
    main()
