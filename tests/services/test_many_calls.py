"""Thousands of calls that are cancelled, and channels to nobody: no memory and no descriptor stays behind."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.playing import ASK
from twostroke.errors import Unavailable
from twostroke.rpc.channel import connect
from twostroke.rpc.status import domain_errors
from twostroke.v1 import kvstore_pb2 as pb
from twostroke.v1 import kvstore_pb2_grpc

ROOT = Path(__file__).parents[2]
WARM, CALLS, AT_ONCE = 1_000, 3_000, 20
BYTES_A_CALL = 1_024  # what may be a matter of the allocator; a call that is kept takes far more

SERVING = """
import asyncio
from tests.support.playing import Playing, Waiting
from twostroke.rpc.server import ServerSettings, serving

async def main():
    async with serving(ServerSettings(drain_seconds=0.0), Playing(Waiting())) as server:
        print(server.address, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def server() -> AsyncIterator[tuple[Process, str]]:
    """A server in a process of its own, whose streams are silent after their first message."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVING, stdout=PIPE, cwd=ROOT)
    try:
        assert process.stdout is not None
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        process.kill()
        await process.wait()


def resident(pid: int) -> int:
    """Bytes of a process in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def cancelled(stub: Any, count: int) -> None:
    """Cancel as many streams: before, while and after their first message is read."""

    async def one(number: int) -> None:
        call = stub.Read(pb.ReadRequest(), timeout=60)
        reading = asyncio.ensure_future(call.read())
        if number % 3:
            await reading
        if number % 3 == 2:
            reading = asyncio.ensure_future(call.read())
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({reading})
        reading.exception() if not reading.cancelled() else None
        assert await call.code() is grpc.StatusCode.CANCELLED

    for start in range(0, count, AT_ONCE):
        await asyncio.gather(*(one(number) for number in range(start, start + AT_ONCE)))


async def test_calls_that_are_cancelled_leave_no_memory_and_no_descriptor_at_either_end() -> None:
    async with server() as (process, address), connect(address) as channel:
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        await cancelled(stub, WARM)
        ends = (process.pid, os.getpid())
        before = [(resident(pid), descriptors(pid)) for pid in ends]
        await cancelled(stub, CALLS)
        for pid, (memory, open_before) in zip(ends, before, strict=True):
            assert resident(pid) - memory < CALLS * BYTES_A_CALL
            assert descriptors(pid) <= open_before


async def test_channels_to_a_server_that_is_down_leave_no_memory_and_no_descriptor() -> None:
    async with server() as (_, address):
        pass
    mine = os.getpid()

    async def knock(count: int) -> None:
        for _ in range(count):
            async with connect(address) as channel:
                with pytest.raises(Unavailable), domain_errors():
                    await kvstore_pb2_grpc.KvStoreServiceStub(channel).GetStatus(ASK, timeout=5)

    await knock(100)
    memory, opened = resident(mine), descriptors(mine)
    await knock(500)
    assert resident(mine) - memory < 500 * 4 * BYTES_A_CALL
    assert descriptors(mine) <= opened
