"""Calls without bytes: a lookup of many keys inside a node, and what a round trip to it costs."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bench.store.ground import KV_FORMAT, NotMoved
from services.kvstore.arena import open_arena
from services.kvstore.blocks import Blocks
from services.kvstore.node import Node
from services.kvstore.settings import StoreSettings
from twostroke.kv.messages import WrittenBlock
from twostroke.kv.refs import Lease

KEYS = 12_500  # 200,000 tokens
SMALL = replace(KV_FORMAT, layers=1, kv_heads=1, head_dim=1)  # 64 bytes a block: bytes are of no account here
KEYS_IN_A_CALL = 2_500


@contextmanager
def holding(keys: list[bytes]) -> Iterator[Blocks]:
    """A node in this process that holds these keys, each committed in the ordinary way."""
    size = (1 << 16) + 2 * len(keys) * (SMALL.block_bytes + 64)
    settings = StoreSettings(arena_bytes=size)
    with (
        tempfile.TemporaryDirectory() as folder,
        open_arena(Path(folder), secrets.token_hex(8), settings.arena_bytes) as arena,
    ):
        node = Node(arena, settings)
        node.address = "in this process"
        node.attach(SMALL, "")
        blocks = node.blocks(node.incarnation)
        lease = blocks.lease(Lease.named(settings.max_lease_seconds).id, settings.max_lease_seconds, opens=True)
        for start in range(0, len(keys), KEYS_IN_A_CALL):
            reserved = blocks.reserve(lease, arena.incarnation, keys[start : start + KEYS_IN_A_CALL])
            written = [WrittenBlock(each.written(SMALL.block_tokens), 0) for each in reserved.slots]
            blocks.commit(lease.id, written)
        yield blocks


def lookup_seconds(blocks: Blocks, keys: list[bytes]) -> float:
    """Seconds of one lookup, as the service does it."""
    began = time.perf_counter()
    held = blocks.reachable(keys)
    seconds = time.perf_counter() - began
    if held != len(keys):
        raise NotMoved(f"the node holds {held} of {len(keys)} keys")
    return seconds


async def seconds_of(call: Callable[[], Awaitable[int]], expected: int) -> float:
    """Seconds of one call that says how many keys are held."""
    began = time.perf_counter()
    held = await call()
    seconds = time.perf_counter() - began
    if held != expected:
        raise NotMoved(f"{held} of {expected} keys are held")
    return seconds
