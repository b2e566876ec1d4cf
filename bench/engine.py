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
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import torch

from bench import ceilings, mixed, steps
from bench.ceilings import Ceilings
from bench.client import BadAnswer, Prompts
from bench.contenders import Contender, ours, peers
from bench.figures import Figures, Ratio, emit, print_ratios
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
from bench.processes import DidNotServe
from twostroke.engine.backends.choice import Device, choose_backend
from twostroke.engine.matrix import WeightMode
from twostroke.engine.weights import LoadedModel, load_model
from twostroke.launcher.models import find_model

THREADS = 2  # of a server of one process
CONTEXTS = (128, 1_024, 4_096, 8_000)
QUICK_CONTEXTS = (128, 1_024)
BATCHES = (1, 8, 32)
MODES = (WeightMode.F16, WeightMode.INT8)
PREFILL_AIMS = {256: 2.0, 1_024: 2.0, 4_096: 1.6}
DECODE_AIMS = {8: 2.0, 16: 2.0, 32: 2.0}
GEMM_AIM, BYTES_AIM, INT8_AIM, START_AIM, MEMORY_AIM, STEP_AIM = 0.7, 0.85, 1.1, 10.0, 1.0, 1.0
F16, INT8, VLLM = "twostroke f16", "twostroke int8", "vllm f32"


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcess:
    """What was measured in this process."""

    ceilings: Ceilings
    weights_gb: float
    loaded: LoadedModel
    contexts: dict[int, float]  # milliseconds of a step, by tokens before it
    host: dict[int, float]  # milliseconds of a step of the tiny model, by rows

    @property
    def byte_bound(self) -> float:
        """Tokens a second of one stream if the memory gave f16 matrices at its best rate."""
        rate = max(*self.ceilings.read_gb, self.weights_gb)
        return 1e9 * rate / ceilings.matrix_bytes(self.loaded.config, WeightMode.F16)

    def gemm_bound(self, length: int) -> float:
        """Prompt tokens a second if all were one float32 product on all threads."""
        seconds = ceilings.prefill_operations(self.loaded.config, length) / 1e9 / max(self.ceilings.gemm_f32)
        return length / seconds

    def step_growth(self) -> float:
        """How much a step grew from the shortest to the longest context, over how much the bytes it reads did."""
        config, short, long = self.loaded.config, min(self.contexts), max(self.contexts)
        matrices = ceilings.matrix_bytes(config, self.loaded.mode)
        read = {context: matrices + ceilings.kv_bytes(config, context) for context in (short, long)}
        return (self.contexts[long] / self.contexts[short]) / (read[long] / read[short])


async def in_process(*, quick: bool, profile: bool) -> InProcess:
    """Measure the machine, then an engine here."""
    print("ceilings of this machine", flush=True)
    found = ceilings.measure(THREADS)
    torch.set_num_threads(1)
    loaded = load_model(find_model(""), mode=WeightMode.F16, backend=choose_backend(Device.CPU))
    rate = ceilings.weights_gb(loaded.model.backend, loaded.config, WeightMode.F16)
    print("steps of an engine in this process", flush=True)
    contexts = await steps.by_context(loaded, QUICK_CONTEXTS if quick else CONTEXTS, threads=1)
    host = await steps.host_ms(steps.tiny_model(), BATCHES)
    if profile:
        print("\n".join(await steps.profile(loaded, rows=max(BATCHES), threads=1)))
    return InProcess(ceilings=found, weights_gb=rate, loaded=loaded, contexts=contexts, host=host)


async def rounds(contenders: Sequence[Contender], loads: Loads) -> Figures:
    """Visit every contender in turn, again and again; one that fails is named and left out of that round."""
    figures, began = Figures(), time.monotonic()
    for round_ in range(loads.rounds):
        for contender in contenders:
            if loads.seconds is not None and time.monotonic() - began > loads.seconds:
                print(f"{contender.name} is left out: its start no longer fits into the time of this run", flush=True)
                continue
            print(f"round {round_ + 1} of {loads.rounds}: {contender.name}", flush=True)
            try:
                figures.add(contender.name, await visit(contender, loads, Prompts(seed=round_)))
            except* (DidNotServe, BadAnswer, aiohttp.ClientError) as failed:
                print(f"  not measured: {failed.exceptions[0]}", flush=True)
    return figures


def show(figures: Figures, here: InProcess, loads: Loads, names: Sequence[str]) -> None:
    """The tables: the machine, the servers with the bound of each figure, steps of an engine here."""
    show_ceilings(here)
    bounds = {prefill_rate(length): ("f32 product", here.gemm_bound(length)) for length in loads.prompts}
    bounds[decode_rate(1)] = ("f16 bytes", here.byte_bound)
    notes = {
        what: f"bound by {kind}: {bound:.0f}, f16 reaches {mine / bound:.2f}"
        for what, (kind, bound) in bounds.items()
        if (mine := figures.median(F16, what)) is not None
    }
    lines = [line for length in loads.prompts for line in (prefill_rate(length), first_ms(length))]
    print("\nservers:")
    figures.print_medians(names, (*lines, *map(decode_rate, loads.streams), START, MEMORY, OTHERS), notes)
    show_steps(here)


def show_ceilings(here: InProcess) -> None:
    """What the machine does at best."""
    most = here.ceilings
    rows = {
        "read, GB/s": most.read_gb,
        "f32 product, GFLOP/s": most.gemm_f32,
        "bf16 product, GFLOP/s": most.gemm_bf16,
        "int8 product, GOP/s": most.gemm_int8,
        "our f16 kernel reads, GB/s": (here.weights_gb,),
    }
    print(f"\nceilings, with one thread and with {THREADS}:")
    for what, rates in rows.items():
        print(f"{what:30}" + "".join(f"{rate:10.1f}" for rate in rates))


def show_steps(here: InProcess) -> None:
    """How a step grows with its context and its rows."""
    print("\none stream, engine in this process, f16, one thread:")
    for context, step in here.contexts.items():
        megabytes = ceilings.kv_bytes(here.loaded.config, context) / 1e6
        print(f"{context:6} tokens before it: {step:7.1f} ms a step, {megabytes:6.1f} MB of keys and values read")
    least, most = min(here.host), max(here.host)
    growth = 1e3 * (here.host[most] - here.host[least]) / (most - least)
    told = ", ".join(f"{rows} rows {step:.2f} ms" for rows, step in here.host.items())
    print(f"host's part of a step (two tiny layers): {told}; {growth:.0f} µs a row")


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
        add(f"f16 prefill {length} / f32 product bound", mine, here.gemm_bound(length), GEMM_AIM)
    add("f16 decode B=1 / byte bound", figures.median(F16, decode_rate(1)), here.byte_bound, BYTES_AIM)
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
    present, absent = peers()
    for name in absent:
        print(f"{name} is not here and left out, with its ratios: `make peers` sets it up")
    others = sorted(present, key=lambda each: each.name == VLLM)  # it takes longest to start
    mine = [ours(mode) for mode in (*MODES, *((WeightMode.F32,) if told.f32 else ()))]
    here = await in_process(quick=told.quick, profile=told.profile)
    figures = await rounds((*mine, *others), loads)
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
    figures, found = asyncio.run(run(told))
    print_ratios(found)
    emit("engine", found, told.out, figures, others_cores=round(others_cores(figures), 2))


if __name__ == "__main__":
    main()
