"""`make bench-store`: what moving a block costs, each way of the store beside what it cannot beat.

Blocks of 360 KiB, by id, 1, 16 and 512 in a call, in turn, round after round; medians are compared:

* into and out of the arena of a store in a process of its own, by shared memory and by gRPC streams, beside a copy;
* to and from the disk tier, which the page cache helps;
* from another node's arena over TCP and over a gRPC stream, beside a bare socket: on loopback, where Redis and the
  transfer engines that `make peers` sets up stand beside them too, and over a veth link, where one can be made;
* a lookup of 12,500 keys inside a node, beside the same in three Redis servers;
* a control round trip, beside a call to a server that does nothing.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from bench.figures import Figures, emit, print_ratios, report
from bench.processes import run_to_end, tree
from bench.quiet import MOST_CORES, Quiet
from bench.store import calls, verdict
from bench.store.ground import BLOCK_BYTES, COUNTS, Ground, spans
from bench.store.others import Copy
from bench.store.ours import CALL_SECONDS, Client
from bench.store.sides import Measured, across, engines, near, redis
from twostroke.heap import keep_freed_memory
from twostroke.v1 import kvstore_pb2 as pb

if TYPE_CHECKING:
    from twostroke.v1.kvstore_pb2_grpc import KvStoreServiceAsyncStub

ROUND_TRIPS = 200  # in a round


async def measure(rounds: int) -> Measured:
    """Run everything."""
    ground, measured, quiet = Ground(), Measured(), Quiet()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        measured.moves[verdict.MEMCPY] = Copy(ground).move
        client = await near(stack, ground, folder / "disk", measured)
        stub = await across(stack, ground, measured)
        await engines(stack, measured)
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
    keep_freed_memory()  # likewise
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
