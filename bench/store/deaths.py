"""Whom the death of a reader takes along, over NIXL's TCP: `python -m bench.store.deaths [TRIES]`; `make peers` first.

Each try starts a source and a reader of all pages, and kills the reader at a random moment within a read. The last line
counts the sources that went with it. See docs/decisions/0020.
"""

from __future__ import annotations

import asyncio
import random
import sys
from dataclasses import replace

from bench.store.ground import BLOCKS
from bench.store.rivals import NIXL, awake

GRACE_SECONDS = 1.0  # in which a source that goes with its reader has gone
READ_SECONDS = 0.3  # less than a read of all pages takes with UCX's own small segments
PLAIN = replace(NIXL, environ={"UCX_TLS": "tcp,self"})


async def dies(tries: int) -> int:
    """How many sources did not outlive their reader."""
    gone = 0
    for _ in range(tries):
        async with awake(PLAIN) as rival:
            await rival.check("NIXL")
            reading = asyncio.create_task(rival.get(range(BLOCKS)))
            await asyncio.wait({reading}, timeout=random.uniform(0.0, READ_SECONDS))
            rival.kill_reader()
            await asyncio.gather(reading, return_exceptions=True)  # of no interest
            gone += await rival.source_gone(GRACE_SECONDS)
    return gone


def main() -> None:
    """Count and print."""
    tries = int(sys.argv[1]) if len(sys.argv) > 1 else 25
    print(f"{asyncio.run(dies(tries))} of {tries} sources died with a reader that was killed")


if __name__ == "__main__":
    main()
