"""What every mover moves: the same blocks, from the same pages into the same pages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np
import numpy.typing as npt

from twostroke.kv.format import KvFormat

KV_FORMAT = KvFormat(
    model="bench",
    weights_digest=bytes(16),
    weight_mode="f16",
    layers=30,
    kv_heads=3,
    head_dim=64,
    block_tokens=16,
    dtype="float16",
    rope_digest=bytes(16),
)
BLOCK_BYTES = KV_FORMAT.block_bytes  # 360 KiB
BLOCKS = 512  # of the ground: more than caches hold
ALIGNMENT = 64
COUNTS = {1: 64, 16: 8, BLOCKS: 1}  # blocks in a call: calls in a round

Rows = npt.NDArray[np.uint8]  # [blocks, block_bytes]
Move = Callable[[range], Awaitable[float]]  # moves the blocks of these pages; answers the seconds of the move alone


class NotMoved(Exception):
    """Fewer blocks moved than were asked for, or other bytes came."""


class Ground:
    """Pages of random bytes, and as many to move them into; `rows` holds both, one after the other."""

    def __init__(self) -> None:
        self.rows: Rows = aligned(2 * BLOCKS)
        self.source, self.target = self.rows[:BLOCKS], self.rows[BLOCKS:]
        self.source[:] = np.random.default_rng(0).integers(0, 256, self.source.shape, dtype=np.uint8)

    async def check(self, who: str, get: Move) -> None:
        """Raise NotMoved unless a move brings every byte."""
        self.target[:] = 0
        await get(range(BLOCKS))
        if not np.array_equal(self.source, self.target):
            raise NotMoved(f"{who} brings other bytes")


def aligned(pages: int) -> Rows:
    """Pages of zeros where torch would put them, at a multiple of 64 bytes.

    numpy's own begin 16 bytes after one, and some processors copy into such a place at half the speed.
    """
    memory = np.zeros(pages * BLOCK_BYTES + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + pages * BLOCK_BYTES].reshape(pages, BLOCK_BYTES)


def spans(round_: int, count: int) -> list[range]:
    """The pages of a round's calls of `count` blocks each; round after round, all pages have their turn."""
    calls = COUNTS[count]
    starts = ((round_ * calls + call) * count % BLOCKS for call in range(calls))
    return [range(start, start + count) for start in starts]


def require(moved: int, span: range, who: str) -> None:
    """Raise NotMoved unless all were moved."""
    if moved != len(span):
        raise NotMoved(f"{who}: {moved} of {len(span)} blocks")
