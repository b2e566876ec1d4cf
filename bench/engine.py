"""`make bench-engine`: our engine beside vLLM, llama.cpp, and what this machine can do at best, in one run.

Every server is started in turn, once a round, and gets the same prompts through its OpenAI completions endpoint as
token ids, each prompt new from its first token on, greedy, exact lengths. Ours is the whole cluster that `twostroke up`
starts. Medians of the rounds are compared. Beside that: ceilings of the machine, steps of an engine in this process at
several contexts, what the host adds to a step, and running streams while a long prompt arrives (bench/mixed.py).

The last line is JSON. Peers that `make peers` has not set up are left out, and so are their ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from bench import inprocess, mixed
from bench.client import BadAnswer, Prompts
from bench.contenders import Contender, ours, peers
from bench.figures import Figures, Ratio, emit, print_ratios
from bench.inprocess import InProcess, show_ceilings, show_steps
from bench.loads import (
    FULL,
    MEMORY,
    OTHERS,
    QUICK,
    START,
    Loads,
    decode_rate,
    first_ms,
    others_cores,
    prefill_rate,
    visit,
    warn_if_disturbed,
)
from bench.processes import DidNotServe, run_to_end
from twostroke.engine.matrix import WeightMode

MODES = (WeightMode.F16, WeightMode.INT8)
PREFILL_AIMS = {256: 2.0, 1_024: 2.0, 4_096: 1.6}
DECODE_AIMS = {8: 2.0, 16: 2.0, 32: 2.0}
GEMM_AIM, BYTES_AIM, INT8_AIM, START_AIM, MEMORY_AIM, STEP_AIM = 0.7, 0.85, 1.1, 10.0, 1.0, 1.0
F16, INT8, VLLM = "twostroke f16", "twostroke int8", "vllm f32"


async def rounds(contenders: Sequence[Contender], loads: Loads, deadline: float | None) -> Figures:
    """Visit every contender in turn, again and again; one that fails is named and left out of that round.

    Args:
        contenders: who; they are visited in this order.
        loads: what each gets.
        deadline: on time.monotonic; what does not fit is left out.
    """
    figures = Figures()
    for round_ in range(loads.rounds):
        for contender in contenders:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left < contender.least_seconds:
                print(f"{contender.name} is left out: it does not fit into the time of this run", flush=True)
                continue
            print(f"round {round_ + 1} of {loads.rounds}: {contender.name}", flush=True)
            try:
                async with asyncio.timeout(left):
                    figures.add(contender.name, await visit(contender, loads, Prompts(seed=round_)))
            except* (DidNotServe, BadAnswer, aiohttp.ClientError) as failed:
                print(f"  not measured: {failed.exceptions[0]}", flush=True)
            except* TimeoutError:
                print("  not measured: the time of this run is over", flush=True)
    return figures


def show(figures: Figures, here: InProcess, loads: Loads, names: Sequence[str]) -> None:
    """The tables: the machine, the servers with the bound of each rate, steps of an engine here."""
    show_ceilings(here)
    bounds = {prefill_rate(length): here.prefill_bound(length) for length in loads.prompts}
    bounds |= {decode_rate(streams): here.decode_bound(streams) for streams in loads.streams}
    notes = {what: bound.note(figures.median(F16, what)) for what, bound in bounds.items()}
    lines = [line for length in loads.prompts for line in (prefill_rate(length), first_ms(length))]
    print("\nservers:")
    figures.print_medians(names, (*lines, *map(decode_rate, loads.streams), START, MEMORY, OTHERS), notes)
    show_steps(here)


def compare(figures: Figures, here: InProcess, modes: Sequence[str], others: Sequence[str]) -> dict[str, Ratio]:
    """Ratios of what was measured; one that lacks a side is left out."""
    found: dict[str, Ratio] = {}

    def add(name: str, mine: float | None, other: float | None, aim: float) -> None:
        if mine is not None and other is not None:
            found[name] = Ratio(mine / other, aim, "higher")

    for length, aim in PREFILL_AIMS.items():
        best = figures.best(modes, prefill_rate(length))
        add(f"prefill {length} / best peer", best, figures.best(others, prefill_rate(length)), aim)
        mine = figures.median(F16, prefill_rate(length))
        add(f"f16 prefill {length} / f32 product bound", mine, here.prefill_bound(length).rate, GEMM_AIM)
    add("f16 decode B=1 / byte bound", figures.median(F16, decode_rate(1)), here.decode_bound(1).rate, BYTES_AIM)
    peer = figures.best(others, decode_rate(1))
    add("int8 decode B=1 / best peer", figures.median(INT8, decode_rate(1)), peer, INT8_AIM)
    for streams, aim in DECODE_AIMS.items():
        best = figures.best(modes, decode_rate(streams))
        add(f"decode B={streams} / best peer", best, figures.best(others, decode_rate(streams)), aim)
    add("vllm start / ours", figures.median(VLLM, START), figures.median(F16, START), START_AIM)
    memory, theirs = figures.median(F16, MEMORY), figures.median(VLLM, MEMORY)
    if memory is not None and theirs is not None:
        found["our memory / vllm"] = Ratio(memory / theirs, MEMORY_AIM, "lower")
    longest = max(here.contexts)
    found[f"step growth to {longest} / byte growth"] = Ratio(here.step_growth(), STEP_AIM, "lower")
    return found


async def run(told: argparse.Namespace) -> tuple[Figures, dict[str, Ratio]]:
    """Measure everything, print tables, answer figures and ratios."""
    loads = QUICK if told.quick else FULL
    deadline = None if loads.seconds is None else time.monotonic() + loads.seconds
    present, absent = peers()
    for name in absent:
        print(f"{name} is not here and left out, with its ratios: `make peers` sets it up")
    others = sorted(present, key=lambda each: each.least_seconds)
    mine = [ours(mode) for mode in (*MODES, *((WeightMode.F32,) if told.f32 else ()))]
    here = await inprocess.measure(quick=told.quick, profile=told.profile)
    figures = await rounds((*mine, *others), loads, deadline)
    modes = [ours(mode).name for mode in MODES]
    show(figures, here, loads, [each.name for each in (*mine, *others)])
    warn_if_disturbed(figures)
    found = compare(figures, here, modes, [each.name for each in others])
    if not told.quick:
        disturbed, more = await mixed.run(quick=False)
        found |= more
        figures.absorb(disturbed)
    return figures, found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="one round of fewer loads, in three minutes; no mixed load"
    )
    parser.add_argument("--f32", action="store_true", help="measure our f32 mode too")
    parser.add_argument("--profile", action="store_true", help="print where the engine's thread spends its time")
    parser.add_argument("--out", type=Path, help="file to write the result to, with every round")
    told = parser.parse_args()
    figures, found = run_to_end(run(told))
    print_ratios(found)
    emit("engine", found, told.out, figures, others_cores=round(others_cores(figures), 2))


if __name__ == "__main__":
    main()
