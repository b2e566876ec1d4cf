"""All four services with both workers on one device: what prefill computes, decode goes on from, by block ID."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import torch

from bench.client import Prompts, Target, steady_rate
from bench.gpu.findings import Finding
from bench.gpu.ground import Ground
from bench.gpu.model import write_model
from bench.gpu.parity import judge, on_cpu
from bench.processes import Spawned, free_port, spawned
from twostroke.client import Client

_START_SECONDS = 80.0
_STREAMS = (1, 8, 32, 64)


def run(ground: Ground) -> None:
    """Start them, ask, and hold the answers to the CPU."""
    write_model(ground)
    asyncio.run(_run(ground))


async def _run(ground: Ground) -> None:
    began = time.perf_counter()
    async with _cluster(ground) as (port, _):
        ground.notes.add(Finding("four services ready", time.perf_counter() - began, "s"))
        with ground.notes.part("answers through four services"):
            await _answers(ground, port + 1)
        with ground.notes.part("load on four services"):
            await _load(ground, port)


@asynccontextmanager
async def _cluster(ground: Ground) -> AsyncIterator[tuple[int, Spawned]]:
    """`twostroke up` on free ports."""
    port = free_port()
    device = "cpu" if ground.emulated else "cuda"
    command = [
        *(
            sys.executable,
            "-m",
            "twostroke",
            "up",
            "--model",
            str(ground.model),
            "--device",
            device,
            "--weights",
            "bf16",
        ),
        *("--port", str(port), "--grpc-port", str(port + 1), "--state-directory", str(ground.folder / "state")),
        *(
            "--kv-bytes",
            "64MiB" if ground.emulated else "4GiB",
            "--arena-bytes",
            "64MiB" if ground.emulated else "4GiB",
        ),
    ]
    async with (
        spawned(command, os.environ) as running,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        watching = asyncio.create_task(running.watch_memory())
        try:
            async with asyncio.timeout(_START_SECONDS):
                while not await _ready(session):
                    running.require_alive()
                    await asyncio.sleep(0.1)
            yield port, running
        except TimeoutError as error:
            raise running.failed("not ready in time") from error
        finally:
            watching.cancel()


async def _ready(session: aiohttp.ClientSession) -> bool:
    try:
        async with session.get("/health/ready") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def _answers(ground: Ground, port: int) -> None:
    """A few greedy answers; each prompt twice, so that the second one comes from stored blocks."""
    draw = torch.Generator().manual_seed(5)
    lengths = [ground.size(200, 20) + 37 * each for each in range(2)]
    prompts = [tuple(torch.randint(300, 49_000, (each,), generator=draw).tolist()) for each in lengths]
    found, cached = {}, 0
    async with Client(f"127.0.0.1:{port}") as client:
        for prompt in prompts:
            for again in (False, True):
                told = await client.complete(prompt, max_tokens=ground.size(32, 6), temperature=0.0, ignore_eos=True)
                found[prompt] = [token.id for token in told.tokens]
                cached += told.usage.cached.local + told.usage.cached.store if again else 0
    ground.notes.add(Finding("prompt tokens that a second request found cached", float(cached), "", at_least=1.0))
    judge(ground, "four services", on_cpu(ground), found)


async def _load(ground: Ground, port: int) -> None:
    """Time to the first token, and tokens a second of several streams."""
    prompts, new = Prompts(seed=7), 128  # so long that streams run together, however they start
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        target = Target(session=session, model="default")
        await target.answer(prompts.take(16), 4)
        first = await target.answer(prompts.take(ground.size(1_024, 40)), 1)
        ground.notes.add(Finding("services, first token of a long prompt", 1e3 * first.first_seconds, "ms"))
        for streams in [ground.size(each, min(each, 2)) for each in _STREAMS]:
            asked = [target.answer(prompts.take(16), new) for _ in range(streams)]
            rate = steady_rate(await asyncio.gather(*asked))
            ground.notes.add(Finding(f"services, decode of {streams} streams", rate, "tok/s"))
            ground.notes.add(Finding(f"services, time per token of {streams} streams", 1e3 * streams / rate, "ms"))
