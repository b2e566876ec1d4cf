"""Who is measured: ourselves in each weight mode, vLLM, and llama.cpp with two files; their servers, as commands.

Ours get what `twostroke up` gives its workers; a peer's one process gets as many threads as one of our workers. Peers'
other defaults stay, except where a default would keep them from the same work or slow it down.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from bench.client import FIRST_IDS, BadAnswer, Target
from bench.peers import LLAMACPP_BINARIES, LLAMACPP_F16, VLLM_MODEL, VLLM_PYTHON, steps
from bench.processes import Spawned, free_port, spawned
from twostroke.engine.backends.choice import usable_processors
from twostroke.engine.matrix import WeightMode
from twostroke.launcher.models import find_model

OURS = "twostroke"  # how our names begin
START_SECONDS = 300.0
ASK_AGAIN_SECONDS = 0.05
FIRST_QUESTION = (FIRST_IDS.start - 1,)  # no other prompt begins like this
CONTEXT = 8_192  # of the packaged model
VLLM_MODULE = "vllm.entrypoints.openai.api_server"  # its `vllm` command looks for another package's metadata


@dataclass(frozen=True, slots=True)
class Room:
    """How much a server must hold at once, where it has to be told: streams, and tokens of each."""

    streams: int
    tokens: int


MANY_STREAMS = Room(32, 4_352)  # or one prompt of 4,096 tokens
LONG_PROMPT = Room(9, CONTEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A server to measure.

    Attributes:
        name: engine and values of the matrices.
        command: the command line for (a port, a folder for its state).
        environ: beside our own environment.
        model: the id to ask for.
        fields: of a request's body, beyond those that all share.
        least_seconds: that a short visit takes, roughly; with less left, it is not begun.
    """

    name: str
    command: Callable[[int, Path], tuple[str, ...]]
    environ: Mapping[str, str] = field(default_factory=dict)
    model: str = "default"
    fields: Mapping[str, object] = field(default_factory=dict)
    least_seconds: float = 10.0

    @property
    def is_ours(self) -> bool:
        """Whether this is Twostroke."""
        return self.name.startswith(OURS)


def ours(mode: WeightMode) -> Contender:
    """All four services, as `twostroke up` starts them."""

    def command(port: int, state: Path) -> tuple[str, ...]:
        return (
            *(sys.executable, "-m", "twostroke", "up", "--weights", mode.value),
            *("--port", str(port), "--grpc-port", "0", "--state-directory", str(state)),
        )

    return Contender(name=f"{OURS} {mode.value}", command=command)


def vllm() -> Contender:
    """vLLM for CPU, float32."""

    def command(port: int, _: Path) -> tuple[str, ...]:
        return (
            *(str(VLLM_PYTHON), "-m", VLLM_MODULE, "--host", "127.0.0.1", "--port", str(port)),
            *("--model", str(VLLM_MODEL), "--served-model-name", "default", "--dtype", "float32"),
            *("--max-model-len", str(CONTEXT), "--enforce-eager"),
        )

    processors = sorted(os.sched_getaffinity(0))[: usable_processors()]
    environ = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, processors)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Contender(name="vllm f32", command=command, environ=environ, least_seconds=60.0)


def llamacpp(kind: str, model: Path, room: Room) -> Contender:
    """llama.cpp's server.

    Each slot has a cache of its own, which is reserved and cleared at the start: with one cache for all it starts
    faster and takes less memory, but decodes eight streams at two thirds of the rate.
    """

    def command(port: int, _: Path) -> tuple[str, ...]:
        return (
            *(str(LLAMACPP_BINARIES / "llama-server"), "--host", "127.0.0.1", "--port", str(port)),
            *("--model", str(model), "--threads", str(usable_processors())),
            *("--parallel", str(room.streams), "--ctx-size", str(room.streams * room.tokens)),
            *("--no-kv-unified", "--cache-ram", "0"),
        )

    return Contender(name=f"llama.cpp {kind}", command=command, fields={"timings_per_token": True})


def peers(room: Room = MANY_STREAMS) -> tuple[tuple[Contender, ...], tuple[str, ...]]:
    """The peers that `make peers` has set up here, and the names of those that it has not."""
    done = {step.name for step in steps() if step.done}
    needs = (
        (vllm(), {"vllm", "vllm-model"}),
        (llamacpp("Q4_1", find_model(""), room), {"llamacpp"}),
        (llamacpp("F16", LLAMACPP_F16, room), {"llamacpp", "llamacpp-f16"}),
    )
    present = tuple(contender for contender, needed in needs if needed <= done)
    return present, tuple(contender.name for contender, needed in needs if not needed <= done)


def line_up(
    modes: Sequence[WeightMode], room: Room, only: Sequence[str] = ()
) -> tuple[tuple[Contender, ...], dict[str, str]]:
    """Who is measured, ourselves first and who starts slowly last; and who is not, with the reason.

    Args:
        modes: of ours.
        room: that peers must have.
        only: words; when there are any, those take part whose name holds one of them.
    """
    present, absent = peers(room)
    everyone = (*map(ours, modes), *sorted(present, key=lambda each: each.least_seconds))
    left_out = dict.fromkeys(absent, "it is not here: `make peers` sets it up")
    if only:
        names = [*(each.name for each in everyone), *absent]
        left_out |= {name: "others were asked for" for name in names if not any(word in name for word in only)}
    return tuple(each for each in everyone if each.name not in left_out), left_out


def part_of_name(word: str) -> str:
    """Return a word that somebody's name holds.

    Raises:
        ArgumentTypeError: nobody's does.
    """
    present, absent = peers()
    names = (*(ours(mode).name for mode in WeightMode), *(each.name for each in present), *absent)
    if not any(word in name for name in names):
        raise argparse.ArgumentTypeError(f"{word!r} is in no name of {', '.join(names)}")
    return word


@dataclass(frozen=True, slots=True)
class Serving:
    """A contender that answers.

    Attributes:
        target: where to ask.
        spawned: its processes, and the memory they take.
        start_seconds: from the command to the first answer.
    """

    target: Target
    spawned: Spawned
    start_seconds: float


@asynccontextmanager
async def serving(contender: Contender) -> AsyncIterator[Serving]:
    """Start a contender, wait for its first answer, and end it with the block.

    Raises:
        DidNotServe: it ended, or did not answer in time.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="twostroke-bench-") as state:
        async with (
            spawned(contender.command(port, Path(state)), contender.environ) as running,
            aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=_connector()) as session,
        ):
            target = Target(session=session, model=contender.model, fields=contender.fields)
            await _first_answer(target, running)
            yield Serving(target, running, time.perf_counter() - running.began)


def _connector() -> aiohttp.TCPConnector:
    """A connection for each request: some servers close idle ones just when they would be used again."""
    return aiohttp.TCPConnector(force_close=True, limit=0)


async def _first_answer(target: Target, running: Spawned) -> None:
    """Ask until it answers."""
    last: Exception | None = None
    try:
        async with asyncio.timeout(START_SECONDS):
            while True:
                running.require_alive()
                try:
                    await target.answer(FIRST_QUESTION, 1)
                except (aiohttp.ClientConnectionError, BadAnswer) as error:  # not there yet, or not ready
                    last = error
                    await asyncio.sleep(ASK_AGAIN_SECONDS)
                else:
                    return
    except TimeoutError as error:
        raise running.failed(f"did not answer in {START_SECONDS:g} s: {last}") from error
