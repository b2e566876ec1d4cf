"""The pages of keys and values, as tensor, token rows and bytes."""

import mmap
from pathlib import Path

import pytest
import torch

from twostroke.engine.cache import KvCache
from twostroke.engine.native.room import free_bytes
from twostroke.errors import Internal
from twostroke.kv.format import KvFormat

FORMAT = KvFormat(
    model="m",
    weights_digest=b"",
    weight_mode="f32",
    layers=2,
    kv_heads=3,
    head_dim=4,
    block_tokens=5,
    dtype="float32",
    rope_digest=b"",
)


def test_all_views_are_the_same_memory() -> None:
    cache = KvCache(FORMAT, 6)
    cache.data[4, 1, 0, 2, 1, 3] = 1.5
    row = ((4 * 2 + 1) * 2 + 0) * 5 + 2
    assert cache.token_rows()[row, 1, 3] == 1.5
    assert cache.rows().shape == (6, FORMAT.block_bytes)
    assert cache.rows()[4].view("<f4").sum() == 1.5
    cache.rows()[4] = 0
    assert not cache.data.any()


async def test_memory_can_be_taken_before_it_is_needed() -> None:
    cache = KvCache(FORMAT, 1 + (200 << 20) // FORMAT.block_bytes)
    before = resident_bytes()
    await cache.take_memory()
    taken = resident_bytes() - before
    assert taken > 190 << 20
    assert not cache.data.any()


def test_pages_that_no_address_space_has_room_for_are_refused() -> None:
    with pytest.raises(Internal, match="no memory for"):
        KvCache(FORMAT, (1 << 50) // FORMAT.block_bytes)


async def test_pages_that_memory_has_no_room_for_are_refused_when_it_is_taken() -> None:
    with pytest.raises(Internal, match="no memory for"):
        await KvCache(FORMAT, 2 + int(free_bytes()) // FORMAT.block_bytes).take_memory()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_a_copied_page_is_equal_and_apart() -> None:
    cache = KvCache(FORMAT, 3)
    cache.data[1] = torch.randn(FORMAT.block_shape)
    cache.copy_page(1, 2)
    assert torch.equal(cache.data[1], cache.data[2])
    cache.data[1] = 0
    assert cache.data[2].any()


def test_a_cache_without_room_beside_the_scratch_page_is_refused() -> None:
    with pytest.raises(Internal, match="scratch"):
        KvCache(FORMAT, 1)
