"""The KV store's contract over real gRPC: what is refused, and that a refusal costs nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
import xxhash

from services.kvstore.streams import outgoing
from tests.support.stores import KV_FORMAT, Store, eventually, key, keys, pages, serving_store
from twostroke import wire
from twostroke.errors import FormatMismatch, InvalidRequest, NotFound, Overloaded, TwostrokeError, WorkerLost
from twostroke.kv import messages
from twostroke.kv.filelock import LockedFile
from twostroke.kv.format import KvFormat
from twostroke.kv.layout import writer_lock_path
from twostroke.kv.messages import PIECE_BYTES, WrittenBlock
from twostroke.rpc.channel import connect
from twostroke.rpc.status import domain_errors
from twostroke.v1 import kvstore_pb2 as pb
from twostroke.v1.kvstore_pb2_grpc import KvStoreServiceStub

WRITER = "writer-1"
TEN = wire.duration_pb(10.0)
BLOCK = pages(1)[0].tobytes()
SEAL = xxhash.xxh3_64_intdigest(BLOCK)
WIDE = dataclasses.replace(KV_FORMAT, head_dim=16_384)  # 2 MiB a block


class Caller:
    """A worker that speaks the contract by hand."""

    def __init__(self, store: Store, stub: KvStoreServiceStub) -> None:
        self.store = store
        self.stub = stub
        self.incarnation = store.node.incarnation

    async def attach(self, kv_format: KvFormat = KV_FORMAT) -> pb.AttachResponse:
        return await self.stub.Attach(pb.AttachRequest(format=wire.kv_format_pb(kv_format)), timeout=5)

    async def reserve(self, *names: int, writer: str = WRITER, lease_id: str = "") -> pb.ReserveResponse:
        request = pb.ReserveRequest(
            incarnation=self.incarnation, writer_id=writer, lease_id=lease_id, lease_duration=TEN, keys=keys(*names)
        )
        return await self.stub.Reserve(request, timeout=5)

    async def write(self, *pieces: pb.WriteRequest, lease_id: str = "") -> pb.WriteResponse:
        first = pb.WriteRequest(incarnation=self.incarnation, lease_id=lease_id, lease_duration=TEN)
        return await self.stub.Write(stream(first, *pieces), timeout=5)


async def stream(*requests: pb.WriteRequest) -> AsyncIterator[pb.WriteRequest]:
    for request in requests:
        yield request


@asynccontextmanager
async def calling(folder: Path, **told: object) -> AsyncIterator[Caller]:
    async with serving_store(folder, **told) as store, connect(store.address) as channel:  # type: ignore[arg-type]
        yield Caller(store, KvStoreServiceStub(channel))


async def refusal(kind: type[TwostrokeError], call: Awaitable[object]) -> TwostrokeError:
    with pytest.raises(kind) as refused, domain_errors():
        await call
    return refused.value


def whole(name: int, data: bytes = BLOCK, *, tokens: int = 16) -> pb.WriteRequest:
    return pb.WriteRequest(key=key(name), data=data, checksum=xxhash.xxh3_64_intdigest(data), tokens=tokens)


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


def calls_with(incarnation: str, stub: KvStoreServiceStub) -> Sequence[Awaitable[object]]:
    named = {"incarnation": incarnation}
    first = pb.WriteRequest(lease_duration=TEN, **named)
    return [
        stub.Lookup(pb.LookupRequest(**named), timeout=5),
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
        short = caller.stub.Acquire(pb.AcquireRequest(keys=keys(1), **named), timeout=5)
        assert (await refusal(InvalidRequest, short)).field == "lease_duration"
        assert caller.store.stats.leases == 0


@pytest.mark.parametrize("writer", ["", "../../etc/passwd", "x" * 65, "nobody-holds-this"])
async def test_a_writer_without_a_sign_of_life_gets_neither_slots_nor_a_lease(tmp_path: Path, writer: str) -> None:
    async with calling(tmp_path) as caller:
        await caller.attach()
        assert (await refusal(InvalidRequest, caller.reserve(1, writer=writer))).field == "writer_id"
        assert caller.store.stats.leases == 0
        assert caller.store.stats.free == 16


@asynccontextmanager
async def writing(folder: Path, **told: object) -> AsyncIterator[Caller]:
    async with calling(folder, **told) as caller:
        attached = await caller.attach()
        with closing(LockedFile(writer_lock_path(Path(attached.arena.path), WRITER))):
            yield caller


async def test_leases_are_bounded_and_the_refusal_says_when_to_come_back(tmp_path: Path) -> None:
    async with writing(tmp_path, max_leases=2) as caller:
        await caller.reserve(1)
        await caller.reserve(2)
        assert (await refusal(Overloaded, caller.reserve(3))).retry_after == 10.0
        caller.store.clock.now += 10.0
        await caller.reserve(3)


async def test_a_lease_that_has_ended_is_not_found_by_anything_that_would_join_it(tmp_path: Path) -> None:
    async with writing(tmp_path) as caller:
        lease = (await caller.reserve(1)).lease_id
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


async def test_commit_needs_a_checksum_where_the_node_keeps_them_and_a_sound_token_count(tmp_path: Path) -> None:
    async with writing(tmp_path, checksums=True) as caller:
        reserved = await caller.reserve(1)
        (place,) = messages.reservations(reserved.reserved)
        named = {"incarnation": caller.incarnation, "lease_id": reserved.lease_id}
        for tokens, checksum, field in ((16, None, "checksum"), (0, 1, "tokens"), (17, 1, "tokens")):
            blocks = messages.written_blocks_pb([WrittenBlock(place.written(tokens), checksum)])
            call = caller.stub.Commit(pb.CommitRequest(blocks=blocks, **named), timeout=5)
            assert (await refusal(InvalidRequest, call)).field == field
        good = messages.written_blocks_pb([WrittenBlock(place.written(5), SEAL)])
        for _ in range(2):
            done = await caller.stub.Commit(pb.CommitRequest(blocks=good, **named), timeout=5)
            assert list(done.committed) == keys(1)


async def test_a_stream_without_a_deadline_is_refused(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        await caller.attach()
        named = {"incarnation": caller.incarnation}
        read = caller.stub.Read(pb.ReadRequest(lease_id="a", **named)).read()
        write = caller.stub.Write(stream(pb.WriteRequest(lease_duration=TEN, **named)))
        for call in (read, write):
            assert (await refusal(InvalidRequest, call)).field == "deadline"


def piece(data: bytes = BLOCK, **fields: object) -> pb.WriteRequest:
    return pb.WriteRequest(data=data, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pieces", "field"),
    [
        pytest.param([piece()], "key", id="no key"),
        pytest.param([piece(BLOCK[:9], key=key(1)), whole(2)], "key", id="a block inside a block"),
        pytest.param([whole(1), piece()], "key", id="after its end"),
        pytest.param([piece(key=b"short")], "key", id="a short key"),
        pytest.param([whole(n) for n in range(5)], "key", id="too many blocks"),
        pytest.param([piece(BLOCK[:9], key=key(1), checksum=SEAL, tokens=16)], "checksum", id="too short"),
        pytest.param([piece(key=key(1)), piece(BLOCK[:1], checksum=SEAL, tokens=16)], "data", id="too long"),
        pytest.param([piece(key=key(1), checksum=SEAL + 1, tokens=16)], "checksum", id="a wrong checksum"),
        pytest.param([piece(key=key(1), checksum=SEAL, tokens=17)], "tokens", id="too many tokens"),
        pytest.param([piece(bytes(PIECE_BYTES + 1), key=key(1))], "data", id="too large a piece"),
    ],
)
async def test_a_malformed_stream_is_refused_and_leaves_no_slot_and_no_lease(
    tmp_path: Path, pieces: list[pb.WriteRequest], field: str
) -> None:
    async with calling(tmp_path, max_keys=4) as caller:
        await caller.attach()
        assert (await refusal(InvalidRequest, caller.write(*pieces))).field == field
        stats = caller.store.stats
        assert (stats.reserved, stats.quarantined, stats.leases) == (0, 0, 0)


async def test_a_stream_that_ends_inside_a_block_commits_the_blocks_before_it(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        await caller.attach()
        written = await caller.write(whole(1, tokens=5), piece(BLOCK[:9], key=key(2)))
        assert [(each.key, each.tokens) for each in written.committed] == [(key(1), 5)]
        assert (caller.store.stats.committed, caller.store.stats.reserved) == (1, 0)


async def test_a_writer_that_leaves_inside_a_block_gives_its_slot_and_lease_back(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        await caller.attach()
        call = caller.stub.Write(timeout=5)
        await call.write(pb.WriteRequest(incarnation=caller.incarnation, lease_duration=TEN))
        await call.write(piece(BLOCK[:9], key=key(1)))
        await eventually(lambda: caller.store.stats.reserved == 1)
        call.cancel()
        await eventually(lambda: caller.store.stats.free == 16)
        await eventually(lambda: caller.store.stats.leases == 0)


async def test_a_stream_that_finds_no_room_is_read_to_its_end_and_dropped(tmp_path: Path) -> None:
    async with writing(tmp_path, slots=64) as caller:
        await caller.reserve(*range(100, 100 + caller.store.stats.slots))
        written = await caller.write(whole(1), whole(2))
        assert list(written.committed) == []


async def test_a_large_block_is_streamed_in_pieces_of_at_most_one_mebibyte(tmp_path: Path) -> None:
    async with calling(tmp_path, kv_format=WIDE, slots=2) as caller:
        await caller.attach(WIDE)
        row = pages(1, WIDE)[0].tobytes()
        cuts = [row[at : at + PIECE_BYTES] for at in range(0, len(row), PIECE_BYTES)]
        sent = [pb.WriteRequest(data=cut) for cut in cuts]
        sent[0].key, sent[-1].checksum, sent[-1].tokens = key(1), xxhash.xxh3_64_intdigest(row), 16
        lease = (await caller.write(*sent)).lease_id
        request = pb.ReadRequest(incarnation=caller.incarnation, lease_id=lease, keys=keys(1))
        got = [each async for each in caller.stub.Read(request, timeout=5)]
        assert b"".join(each.data for each in got) == row
        assert max(len(each.data) for each in got) == PIECE_BYTES
        assert [each.HasField("checksum") for each in got] == [False] * (len(got) - 1) + [True]


async def test_a_stream_ends_with_the_lease_even_inside_a_block(tmp_path: Path) -> None:
    async with calling(tmp_path, kv_format=WIDE, slots=2) as caller:
        await caller.attach(WIDE)
        row = pages(1, WIDE)[0].tobytes()
        first, last = pb.WriteRequest(key=key(1), data=row[:PIECE_BYTES]), pb.WriteRequest(data=row[PIECE_BYTES:])
        last.checksum, last.tokens = xxhash.xxh3_64_intdigest(row), 16
        lease = (await caller.write(first, last)).lease_id
        pieces = outgoing(caller.store.blocks, lease, keys(1))
        assert next(pieces).last is None
        caller.store.clock.now += 10.0
        assert list(pieces) == []


async def test_time_gives_everything_back_without_a_call(tmp_path: Path) -> None:
    async with writing(tmp_path, reservation_seconds=30.0) as caller:
        watching = asyncio.create_task(caller.store.node.watch())
        await caller.reserve(1)
        caller.store.clock.now += 30.0
        request = pb.ReserveRequest(
            incarnation=caller.incarnation, writer_id=WRITER, lease_duration=wire.duration_pb(0.01), keys=keys(2)
        )
        await caller.stub.Reserve(request, timeout=5)  # the earliest end so far wakes the watch
        await eventually(lambda: bool(caller.store.blocks._late))
        watching.cancel()
        await asyncio.wait({watching})


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("module", ["services.kvstore.__main__", "twostroke.kv.client"])
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
