"""The arena file: its layout, who may remove it, and when it refuses to be made."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from services.kvstore.arena import Arena, open_arena, remove_leftovers
from services.kvstore.node import Node
from services.kvstore.settings import StoreSettings
from tests.support.stores import KV_FORMAT
from twostroke.errors import InvalidRequest
from twostroke.kv import layout
from twostroke.kv.filelock import LockedFile, is_held, remove_if_free
from twostroke.kv.layout import SlotHeader, cut, writer_lock_path
from twostroke.kv.refs import BlockRef, BlockSlot, Reservation
from twostroke.settings import InvalidSetting

SIZE = 1 << 18
KEY = bytes(range(16))


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with open_arena(tmp_path, "ab12", SIZE) as made:
        yield made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@given(st.integers(1 << 16, 1 << 30), st.integers(1, 1 << 22))
def test_slots_never_overlap_and_never_leave_the_file(size: int, block: int) -> None:
    try:
        plan = cut(Path("arena"), size, block, checksums=False)
    except InvalidRequest:
        assert size < 2 * layout.PAGE_BYTES + layout.HEADER_BYTES + block + layout.BLOCK_ALIGNMENT
        return
    assert plan.headers_offset >= layout.PAGE_BYTES
    assert plan.header_at(plan.slots) <= plan.blocks_offset
    assert plan.blocks_offset % layout.PAGE_BYTES == 0
    assert plan.block_stride >= plan.block_bytes
    assert plan.block_at(plan.slots - 1) + plan.block_bytes <= plan.file_bytes


@given(st.binary(min_size=16, max_size=16), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_a_header_takes_its_64_bytes(key: bytes, generation: int, tokens: int) -> None:
    assert len(SlotHeader(key, generation, tokens, 2**64 - 1).pack()) == layout.HEADER_BYTES


def test_a_slot_is_cleared_before_it_is_written_and_named_after(arena: Arena) -> None:
    plan = arena.cut(1_000, checksums=True)
    reservation = Reservation(KEY, 7, plan.slots - 1)
    arena.clear(plan, reservation)
    assert arena.header(plan, reservation.slot) == SlotHeader(layout.NO_KEY, 7, 0, 0)
    arena.write(plan, reservation.slot, 0, b"x" * 600)
    arena.write(plan, reservation.slot, 600, b"y" * 400)
    checksum = arena.checksum(plan, reservation.slot)
    arena.publish(plan, reservation.written(5), checksum)
    assert arena.header(plan, reservation.slot) == SlotHeader(KEY, 7, 5, checksum)
    assert checksum == xxhash.xxh3_64_intdigest(b"x" * 600 + b"y" * 400)
    assert arena.read(plan, reservation.slot, 500, 10_000) == b"x" * 100 + b"y" * 400


def test_blocks_and_headers_of_neighbours_stay_untouched(arena: Arena) -> None:
    plan = arena.cut(100, checksums=False)
    for slot in (3, 4, 5):
        arena.write(plan, slot, 0, bytes([slot]) * 100)
        arena.publish(plan, BlockSlot(BlockRef(bytes([slot]) * 16, 1, 1), slot), None)
    arena.write(plan, 4, 0, b"z" * 100)
    arena.clear(plan, Reservation(KEY, 2, 4))
    for slot in (3, 5):
        assert arena.read(plan, slot, 0, 100) == bytes([slot]) * 100
        assert arena.header(plan, slot).key == bytes([slot]) * 16


def test_the_file_says_whose_arena_it_is_and_has_all_its_bytes(arena: Arena) -> None:
    page = arena.path.read_bytes()[: layout.PAGE_BYTES]
    assert layout.is_arena_of(page, "ab12")
    assert not layout.is_arena_of(page, "ab13")
    status = arena.path.stat()
    assert status.st_size == SIZE
    assert status.st_blocks * 512 >= SIZE  # reserved, not sparse
    assert status.st_mode & 0o077 == 0


def test_closing_removes_the_arena_and_the_locks_of_writers_that_are_gone(tmp_path: Path) -> None:
    with open_arena(tmp_path, "ab12", SIZE) as arena:
        writer_lock_path(arena.path, "gone").touch()
        assert len(names(tmp_path)) == 3
    assert names(tmp_path) == []


def test_the_locks_of_writers_that_were_killed_do_not_pile_up_and_those_of_the_living_stay(tmp_path: Path) -> None:
    settings = StoreSettings(arena_bytes=SIZE, arena_directory=tmp_path)
    with open_arena(tmp_path, "ab12", SIZE) as arena, open_arena(tmp_path, "other", SIZE) as other:
        node = Node(arena, settings)
        node.address = "127.0.0.1:1"  # it is not asked under it
        with (
            closing(LockedFile(writer_lock_path(arena.path, "alive"))),
            closing(LockedFile(writer_lock_path(other.path, "alive"))),
        ):
            before = names(tmp_path)
            for life in range(20):
                writer_lock_path(arena.path, f"killed-{life}").touch()
                node.attach(KV_FORMAT, f"killed-{life + 1}")
                assert names(tmp_path) == before


def test_two_arenas_lie_side_by_side(tmp_path: Path) -> None:
    with open_arena(tmp_path, "one", SIZE) as first, open_arena(tmp_path, "two", SIZE) as second:
        assert first.path.exists()
        assert first.path != second.path
        assert first.writer_lives("one")
        assert not first.writer_lives("two")
    assert names(tmp_path) == []


def test_a_starting_node_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom services.kvstore.arena import open_arena\n"
        f"with open_arena(Path(sys.argv[1]), 'dead', {SIZE}):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert ended.returncode == -9
    assert names(tmp_path) == ["twostroke-dead.arena", "twostroke-dead.arena.writer.dead"]
    (tmp_path / "twostroke-notes.txt").touch()
    with open_arena(tmp_path, "one", SIZE) as living, open_arena(tmp_path, "two", SIZE):
        assert living.writer_lives("one")
        assert not (tmp_path / "twostroke-dead.arena").exists()
    assert names(tmp_path) == ["twostroke-notes.txt"]


def test_the_lock_of_a_living_writer_outlives_a_sweep(tmp_path: Path) -> None:
    arena = tmp_path / "twostroke-gone.arena"
    with closing(LockedFile(writer_lock_path(arena, "w"))) as lock:
        remove_leftovers(tmp_path)
        assert lock.path.exists()
    assert names(tmp_path) == []


def test_too_little_room_is_refused_at_once_with_a_cure_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting) as refused, open_arena(tmp_path, "big", 1 << 60):
        pass
    sentence = str(refused.value)
    for part in (f"{1 << 40:,} MiB in {tmp_path}", "MiB are free", "--shm-size", "shm_size", "--arena-directory"):
        assert part in sentence
    assert names(tmp_path) == []


def test_a_directory_that_is_missing_is_refused_by_name(tmp_path: Path) -> None:
    with (
        pytest.raises(InvalidSetting, match=r"--arena-directory .*is no directory"),
        open_arena(tmp_path / "x", "a", 1),
    ):
        pass


def test_a_lock_is_held_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_held(path)
    with closing(LockedFile(path)):
        assert is_held(path)
        assert not remove_if_free(path)
    assert not is_held(path)
    assert not path.exists()


def test_a_lock_that_was_swept_away_while_it_was_taken_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, swept = tmp_path / "lock", []
    real = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and not swept:
            swept.append(path.unlink())  # another node finds the file before it is locked
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with closing(LockedFile(path)) as lock:
        assert os.fstat(lock.descriptor).st_nlink == 1
        assert is_held(path)


def test_a_link_in_place_of_an_arena_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    (tmp_path / "twostroke-evil.arena").symlink_to(victim)
    with open_arena(tmp_path, "one", SIZE):
        assert victim.exists()
