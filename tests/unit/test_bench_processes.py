"""Servers that a benchmark started end with it, however it ends."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from bench.processes import DidNotServe, spawned

# A benchmark that writes the ids of a server's processes once there are two, and waits.
BENCH = """
import asyncio, sys
from bench.processes import run_to_end, spawned, tree

async def main():
    async with spawned(("sh", "-c", "sleep 600 & wait"), {}) as running:
        while len(tree(running.process.pid)) < 2:
            await asyncio.sleep(0.01)
        print(*tree(running.process.pid), flush=True)
        await asyncio.sleep(600)

run_to_end(main())
"""


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "XZ"


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM], 2 * [signal.SIGINT], 3 * [signal.SIGINT]])
async def test_an_interrupted_benchmark_leaves_no_process_behind(signals: list[signal.Signals]) -> None:
    bench = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", BENCH), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert bench.stdout is not None
    servers = list(map(int, (await bench.stdout.readline()).split()))
    assert len(servers) == 2
    for each in signals:
        bench.send_signal(each)
    _, said = await bench.communicate()
    assert said == b"interrupted; all servers were ended\n"
    assert bench.returncode == 1
    assert not any(map(is_alive, servers))


async def test_a_server_that_has_ended_is_reported_with_its_last_words() -> None:
    async with spawned(("sh", "-c", "echo no such model; exit 3"), {}) as running:
        await running.process.wait()
        with pytest.raises(DidNotServe, match="ended with status 3\nno such model"):
            running.require_alive()
