"""The spool: committed blocks reach the tier behind the node's back, and never as something that they are not."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import xxhash

from services.kvstore.arena import Arena, open_arena
from services.kvstore.spool import BURST, Spool
from tests.support.disks import BLOCK_BYTES, content, disk, got, opened, put, room, tokens_of
from tests.support.stores import KV_FORMAT, WAIT_SECONDS, Clock, key, keys
from twostroke.kv.layout import ArenaLayout
from twostroke.kv.refs import BlockRef, BlockSlot, Reservation
from twostroke.kv.tiers.disk import DiskLimits, DiskTier

SLOTS = 8


class Bench:
    """An arena whose slots the test fills, as node and workers do, and a spool that copies them to a tier."""

    def __init__(self, arena: Arena, layout: ArenaLayout, tier: DiskTier, queue: int) -> None:
        self.arena = arena
        self.layout = layout
        self.tier = tier
        self.clock = Clock()
        self.spool = Spool(arena, layout, tier, queue=queue, clock=self.clock)
        self.generations = [0] * layout.slots

    def reserve(self, slot: int, name: int) -> Reservation:
        self.generations[slot] += 1
        reservation = Reservation(key(name), self.generations[slot], slot)
        self.arena.clear(self.layout, reservation)
        return reservation

    def commit(self, slot: int, name: int) -> BlockSlot:
        reservation, data = self.reserve(slot, name), content(key(name))
        self.arena.write(self.layout, slot, 0, data)
        place = reservation.written(tokens_of(key(name)))
        self.arena.publish(self.layout, place, xxhash.xxh3_64_intdigest(data))
        return place

    @contextmanager
    def held(self) -> Iterator[threading.Event]:
        """The tier's thread does nothing before the event is set, or the block is left."""
        go = threading.Event()
        self.spool._thread.submit(go.wait, WAIT_SECONDS)
        try:
            yield go
        finally:
            go.set()


@asynccontextmanager
async def bench(
    tmp_path: Path, tier: DiskTier | None = None, *, queue: int = 64, checksums: bool = False
) -> AsyncIterator[Bench]:
    with open_arena(tmp_path, "ab12", 1 << 17) as arena:
        layout = arena.cut(BLOCK_BYTES, checksums=checksums)
        made = Bench(arena, layout, tier or disk(tmp_path / "disk", SLOTS), queue)
        try:
            yield made
        finally:
            await made.spool.close(WAIT_SECONDS)


class Interrupted(DiskTier):
    """A disk tier in whose writes something happens, before the bytes are copied or after, and in whose reads."""

    before: Callable[[], object] = staticmethod(lambda: None)
    after: Callable[[], object] = staticmethod(lambda: None)
    reading: Callable[[], object] = staticmethod(lambda: None)

    def read(self, key: bytes, into: memoryview) -> int | None:
        self.reading()
        return super().read(key, into)

    def write(self, key: bytes, tokens: int, data: memoryview, intact: Callable[[int], bool]) -> bool:
        def asked(checksum: int) -> bool:
            self.after()
            return intact(checksum)

        self.before()
        return super().write(key, tokens, data, asked)


def interrupted(directory: Path) -> Interrupted:
    limits = DiskLimits(bytes=room(SLOTS), total_bytes=room(SLOTS), retry_seconds=1.0)
    return Interrupted(directory, KV_FORMAT, limits, clock=Clock())


async def test_committed_blocks_are_on_disk_after_a_restart(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        at.spool.offer(at.commit(slot, slot) for slot in range(5))
        await at.spool.idle()
        assert at.tier.holds(keys(0, 1, 2, 3, 4)) == 5
        assert at.spool.stats().written == 5
    with opened(tmp_path / "disk", SLOTS) as tier:
        assert all(got(tier, key(name)) for name in range(5))


async def test_offering_never_waits_and_drops_the_newest_beyond_its_bound(tmp_path: Path) -> None:
    async with bench(tmp_path, queue=3) as at:
        with at.held() as go:
            at.spool.offer([at.commit(slot, slot) for slot in range(5)])
            assert (at.spool.stats().waiting, at.spool.stats().dropped) == (3, 2)
            go.set()
            await at.spool.idle()
        assert at.tier.holds(keys(0, 1, 2, 3)) == 3
        assert at.spool.stats().written == 3


async def test_a_block_that_is_on_disk_is_not_written_again(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        for _ in range(2):
            at.spool.offer([at.commit(0, 1)])
            await at.spool.idle()
        assert (at.spool.stats().written, at.spool.stats().known) == (1, 1)


async def test_a_block_evicted_while_it_waited_is_not_written(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        with at.held():
            at.spool.offer([at.commit(0, 1), at.commit(1, 2)])
            at.commit(0, 3)
        await at.spool.idle()
        assert [at.tier.holds(keys(name)) for name in (1, 2, 3)] == [0, 1, 0]
        assert at.spool.stats().evicted == 1


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("what", ["reserve", "commit"])
async def test_a_block_evicted_while_it_is_copied_is_not_kept(tmp_path: Path, moment: str, what: str) -> None:
    tier = interrupted(tmp_path / "disk")
    async with bench(tmp_path, tier) as at:
        setattr(tier, moment, lambda: getattr(at, what)(0, 3))
        at.spool.offer([at.commit(0, 1)])
        await at.spool.idle()
        assert tier.holds(keys(1)) == tier.holds(keys(3)) == 0
        assert at.spool.stats().evicted == 1
    with opened(tmp_path / "disk", SLOTS) as again:
        assert again.stats().blocks == 0


async def test_the_same_key_in_another_use_of_the_slot_is_another_block(tmp_path: Path) -> None:
    tier = interrupted(tmp_path / "disk")
    async with bench(tmp_path, tier) as at:
        tier.after = lambda: at.commit(0, 1)
        at.spool.offer([at.commit(0, 1)])
        await at.spool.idle()
        assert tier.holds(keys(1)) == 0


async def test_bytes_that_do_not_match_their_writers_checksum_are_not_kept(tmp_path: Path) -> None:
    async with bench(tmp_path, checksums=True) as at:
        place = at.commit(0, 1)
        at.arena.write(at.layout, 0, 77, b"damaged")
        at.spool.offer([place])
        await at.spool.idle()
        assert at.tier.holds(keys(1)) == 0
        assert at.spool.stats().refused == 1


async def test_slots_refilled_all_the_time_never_reach_the_disk_as_something_else(tmp_path: Path) -> None:
    offered, draw = 1_500, random.Random(1)
    async with bench(tmp_path, queue=10) as at:
        for name in range(offered):
            at.spool.offer([at.commit(draw.randrange(4), name)])  # while the thread may be copying this very slot
            if draw.random() < 0.1:
                await at.spool.idle()
            elif draw.random() < 0.3:
                await asyncio.sleep(0)
        await at.spool.idle()
        stats = at.spool.stats()
        assert stats.written + stats.evicted + stats.dropped == offered
        assert min(stats.written, stats.evicted, stats.dropped) > 0
    with opened(tmp_path / "disk", SLOTS) as tier:
        held = [name for name in range(offered) if tier.holds(keys(name))]
        assert len(held) == tier.stats().blocks > 0
        assert all(got(tier, key(name)) for name in held)


async def test_fetched_blocks_fill_their_slots_up_to_the_first_miss(tmp_path: Path) -> None:
    async with bench(tmp_path, checksums=True) as at:
        at.spool.offer([at.commit(0, 1), at.commit(1, 2), at.commit(2, 4)])
        await at.spool.idle()
        wanted = [at.reserve(slot, name) for slot, name in ((4, 1), (5, 2), (6, 3), (7, 4))]
        came = await at.spool.fetch(wanted, 1.0)
        assert [each.place for each in came] == [
            BlockSlot(BlockRef(key(name), 1, tokens_of(key(name))), slot) for slot, name in ((4, 1), (5, 2))
        ]
        for each, name in zip(came, (1, 2), strict=True):
            data = at.arena.read(at.layout, each.place.slot, 0, BLOCK_BYTES)
            assert data == content(key(name))
            assert each.checksum == xxhash.xxh3_64_intdigest(data)


async def test_a_fetch_whose_time_is_up_copies_nothing_more(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        at.spool.offer([at.commit(0, 1)])
        await at.spool.idle()
        with at.held():
            coming = at.spool.fetch([at.reserve(4, 1)], 5.0)
            at.clock.now += 5.0
        assert await coming == []


async def test_a_fetch_waits_for_one_burst_of_writes_at_most(tmp_path: Path) -> None:
    tier, waiting = interrupted(tmp_path / "disk"), list[int]()
    async with bench(tmp_path, tier) as at:
        at.spool.offer([at.commit(0, 100)])
        await at.spool.idle()
        tier.reading = lambda: waiting.append(at.spool.stats().waiting)
        with at.held():
            at.spool.offer([at.commit(1 + slot % 5, slot) for slot in range(3 * BURST)])
            coming = at.spool.fetch([at.reserve(7, 100)], 5.0)
        await coming
        assert waiting == [2 * BURST]
        await at.spool.idle()


async def test_a_disk_in_trouble_costs_commits_nothing(tmp_path: Path) -> None:
    (tmp_path / "disk").touch()
    async with bench(tmp_path) as at:
        at.spool.offer(at.commit(slot, slot) for slot in range(4))
        await at.spool.idle()
        assert at.spool.stats().refused == 4
        assert await at.spool.fetch([at.reserve(5, 1)], 1.0) == []


async def test_closing_writes_what_waits(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        at.spool.offer([at.commit(slot, slot) for slot in range(SLOTS)])
        await at.spool.close(WAIT_SECONDS)
        assert (at.spool.stats().written, at.spool.stats().dropped) == (SLOTS, 0)
        at.spool.offer([at.commit(0, 50)])
        assert at.spool.stats().dropped == 1


async def test_closing_does_not_wait_for_a_tier_that_does_not_answer(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        at.spool.offer([at.commit(0, 1)])
        await at.spool.idle()
        with at.held():
            at.spool.offer([at.commit(slot, slot) for slot in range(2, 5)])
            await at.spool.close(0.01)
            assert (at.spool.stats().waiting, at.spool.stats().dropped) == (0, 3)
        await asyncio.to_thread(at.spool._thread.shutdown)
    with opened(tmp_path / "disk", SLOTS) as tier:
        assert tier.stats().blocks == 1


async def test_a_defect_costs_its_block_and_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = interrupted(tmp_path / "disk")
    async with bench(tmp_path, tier) as at:
        moments = iter([1])
        tier.before = lambda: [1 / 0 for _ in moments]
        at.spool.offer([at.commit(0, 1), at.commit(1, 2)])
        await at.spool.idle()
        assert tier.holds(keys(2)) == 1
        assert "a block was not written" in caplog.text
        assert put(tier, key(3))
