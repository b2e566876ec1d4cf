"""What the path costs: four services against the same engine in one process, in one run.

The same prompts' worth of work is timed in turn, A B A B: an engine inside this process, and a cluster that
`twostroke up` started, asked through the gRPC client. Each prompt is new, so nothing is cached. What the cluster needs
beyond the engine is the price of gRPC, the store and the router; medians are compared. Beside it: the time from the
command to `ready` at a second start, and idle memory per service (the shared arena aside).

The last line is JSON. Shape of the machine and versions are in it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.figures import Ratio, emit, report
from bench.processes import run_to_end
from bench.steps import request
from twostroke.client import Client
from twostroke.engine.backends.choice import Device, choose_backend
from twostroke.engine.engine import Engine, EngineSettings
from twostroke.engine.matrix import WeightMode
from twostroke.engine.weights import load_model
from twostroke.launcher.models import find_model
from twostroke.types import Delta

PROMPT_TOKENS = 500
NEW_TOKENS = 48
AIMS = {
    "overhead_ms_per_token": 1.5,
    "overhead_ms_per_request": 15.0,
    "ready_seconds_second_start": 8.0,
    "router_idle_mb": 150.0,
    "kvstore_idle_mb": 150.0,
}


@dataclass
class Times:
    """Seconds to the first token, and between the following ones, of each run."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)

    def add(self, began: float, arrivals: Sequence[tuple[float, int]]) -> None:
        """Take one answer: when its messages came, and how many tokens there were by then."""
        self.first.append(arrivals[0][0] - began)
        tokens = arrivals[-1][1] - arrivals[0][1]
        self.between.append((arrivals[-1][0] - arrivals[0][0]) / tokens)


async def alone(engine: Engine, prompt: tuple[int, ...], times: Times) -> None:
    """One answer from the engine in this process."""
    began, arrivals, count = time.perf_counter(), [], 0
    async with engine.submit(request(engine, prompt, NEW_TOKENS)) as outputs:
        async for output in outputs:
            if output.tokens:
                count += len(output.tokens)
                arrivals.append((time.perf_counter(), count))
    times.add(began, arrivals)


async def together(client: Client, prompt: tuple[int, ...], times: Times) -> None:
    """The same through four services."""
    began = time.perf_counter()
    events = client.generate(prompt, max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    arrivals = [(time.perf_counter(), event.total_tokens) async for event in events if isinstance(event, Delta)]
    times.add(began, arrivals)


@asynccontextmanager
async def cluster(port: int, state: Path) -> AsyncIterator[tuple[float, int]]:
    """A cluster of real processes; yields the seconds it took to be ready, and its launcher's pid."""
    began = time.perf_counter()
    command = ("-m", "twostroke", "up", "--port", str(port), "--state-directory", str(state))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(120):
            while not (line := await process.stdout.readline()).startswith(b"ready"):
                if not line:
                    raise SystemExit("the cluster did not start; run `make up` to see why")
        yield time.perf_counter() - began, process.pid
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def idle_megabytes(launcher: int) -> dict[str, float]:
    """Resident memory of each service without shared memory, in MB."""
    found: dict[str, float] = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
            words = status.with_name("cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):  # it ended while we looked
            continue
        names = [word.decode() for word in words if word.startswith(b"services.")]
        if names and int(fields["PPid"]) == launcher:
            kilobytes = int(fields["VmRSS"].split()[0]) - int(fields["RssShmem"].split()[0])
            found[names[0].removeprefix("services.")] = kilobytes / 1024
    return found


async def measure(rounds: int, port: int, state: Path) -> dict[str, float]:
    """Run everything; print a table and answer the figures."""
    async with cluster(port, state) as (first_start, _):
        pass
    loaded = load_model(find_model(""), mode=WeightMode.F16, backend=choose_backend(Device.CPU, threads=None))
    one, four, dice = Times(), Times(), random.Random(0)
    async with (
        cluster(port, state) as (second_start, launcher),
        Engine.start(EngineSettings(pages=1_025), loaded.model, loaded.kv_format()) as engine,
        Client(f"127.0.0.1:{port + 1}") as client,
    ):
        memory = idle_megabytes(launcher)
        for round_ in range(rounds + 1):
            print(f"round {round_} of {rounds}", file=sys.stderr, flush=True)
            prompt = tuple(dice.randrange(1_000, 40_000) for _ in range(PROMPT_TOKENS))
            warm = (one, four) if round_ else (Times(), Times())  # the first round warms up
            await alone(engine, prompt, warm[0])
            await together(client, prompt, warm[1])
    print(f"{'':34}{'one process':>14}{'four services':>15}{'overhead':>11}")
    rows = (("time to first token", one.first, four.first), ("between tokens", one.between, four.between))
    overheads = []
    for name, a, b in rows:
        here, there = 1e3 * statistics.median(a), 1e3 * statistics.median(b)
        overheads.append(1e3 * statistics.median(y - x for x, y in zip(a, b, strict=True)))
        print(f"{name + ', ms (median)':34}{here:14.2f}{there:15.2f}{overheads[-1]:11.2f}")
    print(f"{'start to ready, s':34}{first_start:14.1f} first{second_start:9.1f} second")
    for name, megabytes in sorted(memory.items()):
        print(f"{'idle memory, MB: ' + name:34}{megabytes:14.0f}")
    return {
        "overhead_ms_per_token": overheads[1],
        "overhead_ms_per_request": overheads[0],
        "ready_seconds_second_start": second_start,
        "router_idle_mb": memory["router"],
        "kvstore_idle_mb": memory["kvstore"],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: at most three minutes")
    parser.add_argument("--port", type=int, default=18_400, help="first of the ports to use")
    parser.add_argument("--state-directory", type=Path, default=Path("/tmp/twostroke-bench"), help="folder for logs")
    parser.add_argument("--out", type=Path, help="file to write the result to")
    told = parser.parse_args()
    torch.set_num_threads(1)
    figures = run_to_end(measure(5 if told.quick else 15, told.port, told.state_directory))
    emit(report("path", {name: Ratio(value, AIMS[name], "lower") for name, value in figures.items()}), told.out)


if __name__ == "__main__":
    main()
