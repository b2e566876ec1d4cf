"""`make bench-engine`: our engine beside vLLM, llama.cpp, and what this machine can do at best, in one run.

Every server is started in turn, once a round, and gets the same prompts through its OpenAI completions endpoint as
token ids, each prompt new from its first token on, greedy, exact lengths. Ours is the whole cluster that `twostroke up`
starts. Medians of the rounds are compared. Beside that: ceilings of the machine, steps of an engine in this process at
several contexts, what the host adds to a step, and running streams while a long prompt arrives (bench/mixed.py).

The last line is JSON. Peers that `make peers` has not set up are left out, and so are their ratios. A run that is cut
leaves every figure that it had in the file of `--out`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from bench import inprocess, mixed
from bench.client import Prompts
from bench.contenders import MANY_STREAMS, OURS, Contender, line_up
from bench.figures import Figures, Ratio
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
    prefill_rate,
    visit,
    warn_if_disturbed,
)
from bench.processes import run_to_end
from bench.record import Record, add_shared
from twostroke.engine.matrix import WeightMode

MODES = (WeightMode.F16, WeightMode.INT8)
PREFILL_AIMS = {256: 2.0, 1_024: 2.0, 4_096: 1.6}
DECODE_AIMS = {8: 2.0, 16: 2.0, 32: 2.0}
GEMM_AIM, BYTES_AIM, INT8_AIM, START_AIM, MEMORY_AIM, STEP_AIM, HOST_AIM = 0.7, 0.85, 1.1, 10.0, 1.0, 1.0, 1.0
HOST_MS = 3.0
F16, INT8, VLLM = "twostroke f16", "twostroke int8", "vllm f32"
HERE = "this process"


async def rounds(record: Record, contenders: Sequence[Contender], loads: Loads, began: float) -> None:
    """Visit every contender in turn, again and again.

    Args:
        record: takes the figures.
        contenders: who; they are visited in this order.
        loads: what each gets.
        began: the run, on time.monotonic; what does not fit into its time is left out.
    """
    for round_ in range(loads.rounds):
        for contender in contenders:
            minutes = (time.monotonic() - began) / 60
            print(f"round {round_ + 1} of {loads.rounds}, after {minutes:.1f} min: {contender.name}", flush=True)
            await record.take(contender, visit(contender, loads, Prompts(seed=round_)), began + loads.seconds)


def show(figures: Figures, here: InProcess, loads: Loads, names: Sequence[str]) -> None:
    """A table of the servers' figures, with the bound of each rate."""
    bounds = {prefill_rate(length): here.prefill_bound(length) for length in loads.prompts}
    bounds |= {decode_rate(streams): here.decode_bound(streams) for streams in loads.streams}
    notes = {what: bound.note(figures.median(F16, what)) for what, bound in bounds.items()}
    lines = [line for length in loads.prompts for line in (prefill_rate(length), first_ms(length))]
    print("\nservers:")
    figures.print_medians(names, (*lines, *map(decode_rate, loads.streams), START, MEMORY, OTHERS), notes)
    warn_if_disturbed(figures)


def compare(figures: Figures, here: InProcess, names: Sequence[str]) -> dict[str, Ratio]:
    """Ratios of what was measured; one that lacks a side is left out. `names` are those of all contenders."""
    modes, others = (F16, INT8), [name for name in names if not name.startswith(OURS)]
    found: dict[str, Ratio] = {}

    def add(name: str, mine: float | None, other: float | None, aim: float) -> None:
        if mine is not None and other is not None:
            found[name] = Ratio(mine / other, aim, "higher")

    for length, aim in PREFILL_AIMS.items():
        best = figures.best(modes, prefill_rate(length))
        add(f"prefill {length} / best peer", best, figures.best(others, prefill_rate(length)), aim)
        mine = figures.median(F16, prefill_rate(length))
        add(f"f16 prefill {length} / f32 product", mine, here.f32_prefill(length), GEMM_AIM)
        add(f"f16 prefill {length} / product bound", mine, here.prefill_bound(length).rate, GEMM_AIM)
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
    rows = max(here.host)
    found[f"host's part of a step of {rows} / {HOST_MS:g} ms"] = Ratio(here.host[rows] / HOST_MS, HOST_AIM, "lower")
    return found


async def run(told: argparse.Namespace) -> Record:
    """Measure everything and print tables on the way."""
    loads = QUICK if told.quick else FULL
    began = time.monotonic()
    modes = (*MODES, *((WeightMode.F32,) if told.f32 else ()))
    contenders, left_out = line_up(modes, MANY_STREAMS, told.only)
    names = [each.name for each in contenders]
    limit = loads.seconds + (0 if told.quick else mixed.FULL.seconds)
    print(f"plan, {limit / 60:.1f} min at most: {loads.rounds} x {', '.join(names)}", flush=True)
    here = await inprocess.measure(quick=told.quick, profile=told.profile or not told.quick)

    def conclude(figures: Figures) -> dict[str, Ratio]:
        return compare(figures, here, names) | mixed.ratios(figures, [F16])

    record = Record("engine", here.loaded.model.backend.name, told.out, conclude)
    for name, why in left_out.items():
        record.leave_out(name, why)
    record.add_all(HERE, here.figures())
    show_ceilings(here)
    show_steps(here)
    await rounds(record, contenders, loads, began)
    show(record.figures, here, loads, names)
    if not told.quick:
        await mixed.run(record, told.only, quick=False)
    return record


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer loads, once, in three minutes; no mixed load")
    parser.add_argument("--f32", action="store_true", help="measure our f32 mode too")
    parser.add_argument("--profile", action="store_true", help="print where a step's time goes in a quick run too")
    add_shared(parser)
    told = parser.parse_args()
    run_to_end(run(told)).finish()


if __name__ == "__main__":
    main()
