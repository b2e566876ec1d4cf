"""Sources that die, stick, lie or refuse: a read ends with what came whole, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import socket
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.peers import NAMESPACE, block_ends, held, reading, relayed, sourcing
from tests.support.processes import ROOT
from tests.support.stores import WAIT_SECONDS, eventually
from twostroke.errors import Unavailable
from twostroke.kv.refs import BlockRef, BlockSlot, Lease, Offer
from twostroke.kv.transport.frames import Code, Status, Trailer
from twostroke.kv.transport.peer import Grant

SOURCE = """
import asyncio, json, sys
from pathlib import Path
from tests.support.peers import LARGE, sourcing

async def main():
    async with sourcing(Path(sys.argv[1]), kv_format=LARGE, slots=3) as source:
        grant, blocks = source.holding(1, 2, 3)
        print(json.dumps({
            "address": source.plane.offer.address.decode(), "incarnation": grant.lease.incarnation,
            "lease": grant.lease.id, "proof": grant.proof.hex(), "block_bytes": source.block_bytes,
            "blocks": [[each.block.key.hex(), each.block.generation, each.slot] for each in blocks],
        }), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def source_process(folder: Path) -> AsyncIterator[tuple[Process, Offer, Grant, list[BlockSlot], int]]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SOURCE, str(folder), stdout=PIPE, cwd=ROOT)
    try:
        assert process.stdout is not None
        told = json.loads(await process.stdout.readline())
        lease = Lease(id=told["lease"], seconds=10.0, incarnation=told["incarnation"])
        blocks = [
            BlockSlot(BlockRef(bytes.fromhex(key), generation, 16), slot) for key, generation, slot in told["blocks"]
        ]
        grant = Grant(lease, NAMESPACE, bytes.fromhex(told["proof"]))
        yield process, Offer("tcp", told["address"].encode()), grant, blocks, told["block_bytes"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_source_that_dies_or_sticks_inside_a_block_leaves_the_blocks_before_it(
    tmp_path: Path, fault: int
) -> None:
    async with source_process(tmp_path) as (process, offer, grant, blocks, size):
        with relayed(offer, hold_at=block_ends(size, 0) + 1_000) as relay:
            async with reading(relay.offer, block_seconds=1.0) as transport:
                into = [memoryview(bytearray(size)) for _ in blocks]
                task = asyncio.create_task(transport.read(grant, blocks, into, None))
                assert await asyncio.to_thread(relay.held.wait, WAIT_SECONDS)
                process.send_signal(fault)
                if fault == signal.SIGKILL:
                    await process.wait()
                relay.go.set()
                pulled = await task
                assert (len(pulled.blocks), type(pulled.error)) == (1, Unavailable)


async def test_a_stuck_source_that_reads_no_request_hits_the_time_limit(tmp_path: Path) -> None:
    async with (
        source_process(tmp_path) as (process, offer, grant, blocks, size),
        reading(offer, block_seconds=0.2) as transport,
    ):
        process.send_signal(signal.SIGSTOP)
        pulled = await transport.read(grant, blocks, [memoryview(bytearray(size)) for _ in blocks], None)
        assert (pulled.blocks, type(pulled.error)) == ((), Unavailable)


GRANT = Grant(Lease(id="l", seconds=10.0, incarnation="i"), "", bytes(32))
BLOCK = BlockSlot(BlockRef(bytes(16), 1, 16), 0)
GREETING, ANSWER = Status(Code.OK).pack(), Status(Code.OK, 64).pack()
WHOLE = bytes(64) + Trailer(True, True, 16, 0xB7F2).pack()


@given(
    st.lists(st.sampled_from([GREETING, ANSWER, WHOLE, Status(Code.BUSY).pack()]) | st.binary(max_size=99), max_size=6)
)
def test_whatever_a_source_says_a_read_ends_and_takes_no_block_that_is_not_whole(said: list[bytes]) -> None:
    def say(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):  # the reader leaves as soon as it has heard enough
            connection.sendall(b"".join(said))
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4_096):
                pass

    async def read(port: int) -> None:
        async with reading(Offer("tcp", f"127.0.0.1:{port}".encode())) as transport:
            pulled = await transport.read(GRANT, [BLOCK] * 2, [memoryview(bytearray(64)) for _ in range(2)], None)
            assert pulled.blocks == ()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=say, args=(listener,))
        thread.start()
        asyncio.run(read(listener.getsockname()[1]))
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()


async def test_a_thousand_failing_reads_leave_no_descriptor_and_no_thread(tmp_path: Path) -> None:
    async with sourcing(tmp_path) as source:
        grant, blocks = source.holding(1)
        forged = dataclasses.replace(grant, proof=bytes(32))
        before = held()
        async with reading(source.plane.offer) as transport:
            for _ in range(1_000):
                assert (await transport.read(forged, blocks, source.memory(1), None)).error is not None
        await eventually(lambda: source.plane.connections == 0)
        descriptors, threads = held()
        assert descriptors <= before[0]
        assert threads <= before[1] + 32  # the plane's own
