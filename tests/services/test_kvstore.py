"""The KV store's contract over real gRPC: what is refused, and that a refusal costs nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from collections.abc import Awaitable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from services.kvstore.assembly import assembled
from services.kvstore.settings import KvStoreSettings, StoreSettings
from tests.support.storecalls import (
    LEASE,
    SEAL,
    TEN,
    WRITER,
    calling,
    refusal,
    stream,
    whole,
    writing,
)
from tests.support.stores import KV_FORMAT, eventually, keys
from twostroke.errors import FormatMismatch, InvalidRequest, NotFound, Overloaded, WorkerLost
from twostroke.kv import messages
from twostroke.kv.filelock import LockedFile
from twostroke.kv.layout import writer_lock_path
from twostroke.kv.messages import WrittenBlock
from twostroke.kv.refs import Lease
from twostroke.rpc.server import ServerSettings
from twostroke.v1 import kvstore_pb2 as pb

if TYPE_CHECKING:  # a name of the stubs only
    from twostroke.v1.kvstore_pb2_grpc import KvStoreServiceAsyncStub


async def test_a_node_is_empty_until_the_first_worker_says_what_a_block_is(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        status = await caller.stub.GetStatus(pb.GetStoreStatusRequest(), timeout=5)
        assert (status.slots, status.HasField("format")) == (0, False)
        attached = await caller.attach()
        status = await caller.stub.GetStatus(pb.GetStoreStatusRequest(), timeout=5)
        assert attached.incarnation == status.incarnation == caller.incarnation
        assert attached.arena.slots == status.slots == status.free == 16
        assert status.format.digest == KV_FORMAT.digest


async def test_a_worker_of_another_format_is_refused_and_told_which_field_differs(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        await caller.attach()
        other = dataclasses.replace(KV_FORMAT, block_tokens=32)
        assert (await refusal(FormatMismatch, caller.attach(other))).field == "kv_format.block_tokens"
        await caller.attach()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layers": 0}, "kv_format.layers"),
        ({"head_dim": 1 << 20}, "kv_format.head_dim"),
        ({"dtype": "float8"}, "kv_format.dtype"),
        ({"layers": 60_000, "head_dim": 60_000}, "kv_format"),
    ],
)
async def test_a_format_that_no_arena_can_hold_is_refused(
    tmp_path: Path, change: dict[str, object], field: str
) -> None:
    async with calling(tmp_path) as caller:
        bad = dataclasses.replace(KV_FORMAT, **change)  # type: ignore[arg-type]
        assert (await refusal(InvalidRequest, caller.attach(bad))).field == field
        await caller.attach()  # the node is not spoilt by it


def calls_with(incarnation: str, stub: KvStoreServiceAsyncStub) -> Sequence[Awaitable[object]]:
    named = {"incarnation": incarnation}
    first = pb.WriteRequest(lease_duration=TEN, **named)
    return [
        stub.Lookup(pb.LookupRequest(**named), timeout=5),
        stub.Await(pb.AwaitRequest(**named), timeout=5),
        stub.Keep(pb.KeepRequest(**named), timeout=5),
        stub.Forget(pb.ForgetRequest(**named), timeout=5),
        stub.Reserve(pb.ReserveRequest(writer_id=WRITER, lease_duration=TEN, **named), timeout=5),
        stub.Commit(pb.CommitRequest(**named), timeout=5),
        stub.Abandon(pb.AbandonRequest(**named), timeout=5),
        stub.Acquire(pb.AcquireRequest(lease_duration=TEN, **named), timeout=5),
        stub.Renew(pb.RenewRequest(lease_duration=TEN, **named), timeout=5),
        stub.Release(pb.ReleaseRequest(**named), timeout=5),
        stub.Read(pb.ReadRequest(**named), timeout=5).read(),
        stub.Write(stream(first), timeout=5),
    ]


async def test_every_call_that_names_an_older_life_of_the_node_is_answered_with_worker_lost(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        await caller.attach()
        for call in calls_with("an-older-one", caller.stub):
            assert (await refusal(WorkerLost, call)).field == "incarnation"


async def test_keys_and_leases_are_checked_and_bounded(tmp_path: Path) -> None:
    async with calling(tmp_path, max_keys=3) as caller:
        await caller.attach()
        named = {"incarnation": caller.incarnation}
        for bad in ([b"x" * 15], [b""], keys(1, 2, 3, 4)):
            for call in (
                caller.stub.Lookup(pb.LookupRequest(keys=bad, **named), timeout=5),
                caller.stub.Acquire(pb.AcquireRequest(keys=bad, lease_duration=TEN, **named), timeout=5),
            ):
                assert (await refusal(InvalidRequest, call)).field == "keys"
        many = caller.stub.Release(pb.ReleaseRequest(lease_ids=["a"] * 4, **named), timeout=5)
        assert (await refusal(InvalidRequest, many)).field == "lease_ids"
        short = caller.stub.Acquire(pb.AcquireRequest(keys=keys(1), lease_id=LEASE, **named), timeout=5)
        assert (await refusal(InvalidRequest, short)).field == "lease_duration"
        for name in ("", "a", "A" * 32, "0" * 31, "0" * 33):
            unnamed = pb.AcquireRequest(keys=keys(1), lease_id=name, opens=True, lease_duration=TEN, **named)
            refused = await refusal(InvalidRequest, caller.stub.Acquire(unnamed, timeout=5))
            assert refused.field == "lease_id"
        assert caller.store.stats.leases == 0


@pytest.mark.parametrize("writer", ["", "../../etc/passwd", "x" * 65, "nobody-holds-this"])
async def test_a_writer_without_a_sign_of_life_gets_neither_slots_nor_a_lease(tmp_path: Path, writer: str) -> None:
    async with calling(tmp_path) as caller:
        await caller.attach()
        assert (await refusal(InvalidRequest, caller.reserve(1, writer=writer))).field == "writer_id"
        assert caller.store.stats.leases == 0
        assert caller.store.stats.free == 16


async def test_leases_are_bounded_and_the_refusal_says_when_to_come_back(tmp_path: Path) -> None:
    async with writing(tmp_path, max_leases=2) as caller:
        caller.store.blocks.lease("1" * 32, 10.0, opens=True)
        caller.store.blocks.lease("2" * 32, 10.0, opens=True)
        assert (await refusal(Overloaded, caller.reserve(3))).retry_after == 10.0
        caller.store.clock.now += 10.0
        await caller.reserve(3)


async def test_a_lease_that_has_ended_is_not_found_by_anything_that_would_join_it(tmp_path: Path) -> None:
    async with writing(tmp_path) as caller:
        await caller.reserve(1)
        lease = LEASE
        caller.store.clock.now += 10.0
        named = {"incarnation": caller.incarnation, "lease_id": lease}
        for call in (
            caller.reserve(2, lease_id=lease),
            caller.stub.Acquire(pb.AcquireRequest(lease_duration=TEN, **named), timeout=5),
            caller.stub.Read(pb.ReadRequest(**named), timeout=5).read(),
            caller.write(whole(3), lease_id=lease),
        ):
            await refusal(NotFound, call)
        renewed = await caller.stub.Renew(
            pb.RenewRequest(incarnation=caller.incarnation, lease_ids=[lease], lease_duration=TEN), timeout=5
        )
        assert list(renewed.alive) == []


async def test_ends_that_are_told_twice_too_late_or_to_no_purpose_change_nothing(tmp_path: Path) -> None:
    async with writing(tmp_path) as caller:
        reserved = await caller.reserve(1, 2, 3)
        places = messages.reservations(reserved.reserved)
        named = {"incarnation": caller.incarnation}
        written = messages.written_blocks_pb([WrittenBlock(places[0].written(16), SEAL)])
        commit = pb.CommitRequest(lease_id=LEASE, blocks=written, **named)
        abandon = pb.AbandonRequest(blocks=messages.reservations_pb(places), **named)
        release = pb.ReleaseRequest(lease_ids=[LEASE, "never-given"], **named)
        for _ in range(2):  # each of them races its own repetition, and those that follow
            ends = [caller.stub.Commit(commit, timeout=5), caller.stub.Abandon(abandon, timeout=5)]
            await asyncio.gather(*ends, *(caller.stub.Abandon(abandon, timeout=5) for _ in range(5)))
        for _ in range(2):
            await asyncio.gather(*(caller.stub.Release(release, timeout=5) for _ in range(5)))
            assert list((await caller.stub.Commit(commit, timeout=5)).committed) == []
        stats = caller.store.stats
        assert (stats.reserved, stats.quarantined, stats.leases, stats.free + stats.committed) == (0, 0, 0, 16)


async def test_commit_needs_a_checksum_where_the_node_keeps_them_and_a_sound_token_count(tmp_path: Path) -> None:
    async with writing(tmp_path, checksums=True) as caller:
        reserved = await caller.reserve(1)
        (place,) = messages.reservations(reserved.reserved)
        named = {"incarnation": caller.incarnation, "lease_id": LEASE}
        for tokens, checksum, field in ((16, None, "checksum"), (0, 1, "tokens"), (17, 1, "tokens")):
            blocks = messages.written_blocks_pb([WrittenBlock(place.written(tokens), checksum)])
            call = caller.stub.Commit(pb.CommitRequest(blocks=blocks, **named), timeout=5)
            assert (await refusal(InvalidRequest, call)).field == field
        good = messages.written_blocks_pb([WrittenBlock(place.written(5), SEAL)])
        for _ in range(2):
            done = await caller.stub.Commit(pb.CommitRequest(blocks=good, **named), timeout=5)
            assert list(done.committed) == keys(1)


async def test_what_is_due_ends_and_what_a_dead_writer_had_returns_without_any_call(tmp_path: Path) -> None:
    told = StoreSettings(arena_bytes=1 << 18, arena_directory=tmp_path, reservation_seconds=0.05, max_lease_seconds=0.1)
    settings = KvStoreSettings(server=ServerSettings(drain_seconds=1.0), store=told)
    async with assembled(settings) as (_, node):
        attached = node.attach(KV_FORMAT, WRITER)
        blocks = node.blocks(attached.incarnation)
        book = blocks._store  # read past `Blocks`, which would itself end what is due
        blocks.lease(Lease.named(0.01).id, 0.01, opens=True)
        await eventually(lambda: book.stats().leases == 0)  # from here on nothing is due, until a call changes that
        with closing(LockedFile(writer_lock_path(attached.layout.path, WRITER))):
            blocks.reserve(blocks.lease(Lease.named(60.0).id, 60.0, opens=True), WRITER, keys(1, 2))
            await eventually(lambda: book.stats().quarantined == 2)
            await eventually(lambda: book.stats().leases == 0)
        await eventually(lambda: book.stats().free == attached.layout.slots)


async def test_nobody_may_write_in_the_name_of_the_node_itself(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        await caller.attach()
        assert (await refusal(InvalidRequest, caller.reserve(1, writer=caller.incarnation))).field == "writer_id"


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("module", ["services.kvstore.assembly", "twostroke.kv.client"])
def test_node_and_lookups_need_neither_numpy_nor_torch(module: str) -> None:
    found = python(f"import sys, {module}\nprint({{'numpy', 'torch'}} & set(sys.modules))")
    assert found.stdout.strip() == "set()", found.stderr


def test_a_node_without_room_for_its_arena_ends_at_once_and_says_what_to_do(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.kvstore", "--arena-directory", str(tmp_path), "--arena-bytes"]
    ended = subprocess.run([*command, str(1 << 60)], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 2
    assert "MiB are free" in ended.stderr
    assert "--shm-size" in ended.stderr
    assert list(tmp_path.iterdir()) == []
