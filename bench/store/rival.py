"""Another's transfer engine, in an environment of its own that has none of our code: one process, source or reader.

    python rival.py source ENGINE                        prints what a reader is told, and serves until it is killed
    python rival.py reader ENGINE TOLD...                answers lines "START COUNT" with the seconds of that move, and
                                                         "check" with how many blocks hold what the source has

Both have the same pages, of random bytes from one seed. The reader's own clock is around the engine's calls alone.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

BLOCK_BYTES, BLOCKS = 360 << 10, 512
POLL_SECONDS = 20e-6  # what NIXL's users poll with; it has no event to wait for


class Engine(Protocol):
    """One process' end of an engine, with its pages registered."""

    def told(self) -> list[str]:
        """What a reader needs to know of this source."""

    def meet(self, *told: str) -> None:
        """Learn of the source."""

    def read(self, start: int, count: int) -> None:
        """Fill pages with the source's, and return when all their bytes are there."""


class Nixl:
    """NIXL over UCX, by the calls of its own examples. A source's progress thread answers; a reader polls."""

    def __init__(self, rows: Any, *, serves: bool) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        config = nixl_agent_config(enable_prog_thread=serves, backends=["UCX"])
        self._agent = nixl_agent("source" if serves else "reader", config)
        self._base = self._remote = rows.ctypes.data
        self._agent.register_memory([(self._base, rows.nbytes, 0, "")], "DRAM")

    def told(self) -> list[str]:
        """See Engine."""
        return [str(self._base), self._agent.get_agent_metadata().hex()]

    def meet(self, *told: str) -> None:
        """See Engine."""
        self._remote = int(told[0])
        self._peer = self._agent.add_remote_agent(bytes.fromhex(told[1]))

    def read(self, start: int, count: int) -> None:
        """See Engine."""
        into, source = (self._agent.get_xfer_descs(self._spans(each, start, count), "DRAM") for each in self._bases())
        handle = self._agent.initialize_xfer("READ", into, source, self._peer)
        state = self._agent.transfer(handle)
        while state == "PROC":
            time.sleep(POLL_SECONDS)
            state = self._agent.check_xfer_state(handle)
        handle.release()
        if state != "DONE":
            raise RuntimeError(state)

    def _bases(self) -> tuple[int, int]:
        return self._base, self._remote

    def _spans(self, base: int, start: int, count: int) -> Any:
        spans = np.zeros((count, 3), dtype=np.uint64)
        spans[:, 0] = base + BLOCK_BYTES * np.arange(start, start + count, dtype=np.uint64)
        spans[:, 1] = BLOCK_BYTES
        return spans


class Mooncake:
    """Mooncake's transfer engine over TCP, without a metadata server."""

    def __init__(self, rows: Any, *, serves: bool) -> None:  # noqa: ARG002
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        self._base = rows.ctypes.data
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("the engine does not start")
        if self._engine.register_memory(self._base, rows.nbytes):
            raise RuntimeError("the engine takes no memory")

    def told(self) -> list[str]:
        """See Engine."""
        return [str(self._base), str(self._engine.get_rpc_port())]

    def meet(self, *told: str) -> None:
        """See Engine."""
        self._remote, self._peer = int(told[0]), f"127.0.0.1:{told[1]}"

    def read(self, start: int, count: int) -> None:
        """See Engine."""
        offsets = range(start * BLOCK_BYTES, (start + count) * BLOCK_BYTES, BLOCK_BYTES)
        into, source = ([base + each for each in offsets] for base in (self._base, self._remote))
        if self._engine.batch_transfer_sync_read(self._peer, into, source, [BLOCK_BYTES] * count):
            raise RuntimeError("the engine failed")


ENGINES: dict[str, Callable[..., Engine]] = {"nixl": Nixl, "mooncake": Mooncake}


def aligned() -> Any:
    """Pages of zeros at a multiple of 64 bytes, as ours are in the benchmark."""
    memory = np.zeros(BLOCKS * BLOCK_BYTES + 64, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + BLOCKS * BLOCK_BYTES].reshape(BLOCKS, BLOCK_BYTES)


def main(role: str, name: str, *told: str) -> None:
    """Serve, or answer lines until they end."""
    rows, pages = aligned(), np.random.default_rng(0).integers(0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    if role == "source":
        rows[:] = pages
    engine: Engine = ENGINES[name](rows, serves=role == "source")
    if role == "source":
        print("TOLD", *engine.told(), flush=True)
        sys.stdin.read()
        os._exit(0)
    engine.meet(*told)
    print("TOLD", flush=True)
    for line in sys.stdin:
        if line.strip() == "check":
            answer = float((rows == pages).all(axis=1).sum())
        else:
            start, count = map(int, line.split())
            began = time.perf_counter()
            engine.read(start, count)
            answer = time.perf_counter() - began
        print("TOLD", answer, flush=True)
    os._exit(0)  # engines' own ends are not ours to time


if __name__ == "__main__":
    main(*sys.argv[1:])
