"""The disk tier while the disk works: what it keeps, for how long, and beside whom."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from services.kvstore.settings import DiskSettings
from tests.support.disks import disk, flip, folder_bytes, got, opened, put, room, tokens_of
from tests.support.stores import KV_FORMAT, key, keys
from twostroke.kv.filelock import try_hold
from twostroke.kv.tiers import folders
from twostroke.settings import InvalidSetting

OTHERS = [dataclasses.replace(KV_FORMAT, model=f"model-{name}") for name in range(3)]


def test_a_block_is_read_as_it_was_written_also_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        assert put(tier, key(1))
        assert put(tier, key(2))
        assert got(tier, key(1))
    with opened(tmp_path) as tier:
        assert tier.holds(keys(1, 2, 3)) == 2
        assert got(tier, key(1))
        assert got(tier, key(2))
        assert not got(tier, key(3))


def test_only_leading_keys_count(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        put(tier, key(1))
        put(tier, key(3))
        assert [tier.holds(names) for names in (keys(1, 2, 3), keys(2, 1), keys(3, 1), [])] == [1, 0, 2, 0]


def test_a_tier_that_is_not_open_holds_nothing_and_takes_nothing(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    assert not put(tier, key(1))
    assert tier.holds(keys(1)) == 0
    assert not got(tier, key(1))
    tier.open()
    assert put(tier, key(1))
    tier.close()
    assert not put(tier, key(2))
    assert (tier.holds(keys(1)), tier.stats().on) == (0, False)


def test_the_oldest_block_leaves_a_full_tier_unless_it_was_read(tmp_path: Path) -> None:
    with opened(tmp_path, slots=3) as tier:
        for name in range(3):
            put(tier, key(name))
        assert got(tier, key(0))
        put(tier, key(3))
        assert [tier.holds(keys(name)) for name in range(4)] == [1, 0, 1, 1]
        assert tier.stats().blocks == tier.stats().slots == 3


def test_a_block_whose_source_changed_is_not_kept_and_its_slot_is_written_next(tmp_path: Path) -> None:
    with opened(tmp_path, slots=2) as tier:
        put(tier, key(1))
        for _ in range(3):
            assert not put(tier, key(2), intact=lambda checksum: False)
        assert tier.holds(keys(2)) == 0
        put(tier, key(3))
        assert tier.holds(keys(1, 3)) == 2
        assert not put(tier, key(4), intact=lambda checksum: False)
    with opened(tmp_path, slots=2) as tier:
        assert tier.holds(keys(3)) == 1
        assert tier.stats().blocks == 1  # the slot of 1 was about to be written anew
        assert got(tier, key(3))
        assert tier.stats().damaged == 0


def test_a_held_block_is_not_written_again(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        put(tier, key(1))
        assert put(tier, key(1), intact=lambda checksum: pytest.fail("copied"))


@pytest.mark.parametrize("at", [0, 2_000, 4_095])
def test_a_flipped_byte_is_a_miss_and_drops_the_block_for_good(tmp_path: Path, at: int) -> None:
    with opened(tmp_path) as tier:
        put(tier, key(1))
        put(tier, key(2))
        flip(tier, folders.BLOCKS, at)
        assert tier.holds(keys(1)) == 1
        assert not got(tier, key(1))
        assert tier.holds(keys(1)) == 0
        assert (tier.stats().damaged, tier.stats().on) == (1, True)
    with opened(tmp_path) as tier:
        assert tier.holds(keys(2, 1)) == 1
        assert put(tier, key(1))
        assert got(tier, key(1))


def test_a_damaged_header_is_no_block_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        put(tier, key(1))
        put(tier, key(2))
    flip(tier, folders.HEADERS, 9)
    with opened(tmp_path) as tier:
        assert tier.holds(keys(1)) == 0
        assert got(tier, key(2))


@pytest.mark.parametrize("name", [folders.HEADERS, folders.BLOCKS])
def test_a_file_cut_short_costs_the_blocks_that_lay_there(tmp_path: Path, name: str) -> None:
    with opened(tmp_path) as tier:
        put(tier, key(1))
        put(tier, key(2))
        os.truncate(tier.folder / name, (tier.folder / name).stat().st_size // 4)
        assert got(tier, key(1))
        got(tier, key(2))
    with opened(tmp_path) as tier:
        assert got(tier, key(1))
        assert not got(tier, key(2))
        assert put(tier, key(2))
        assert got(tier, key(2))


def test_the_room_is_reserved_at_once_and_never_exceeded(tmp_path: Path) -> None:
    with opened(tmp_path, slots=64) as tier:
        before = folder_bytes(tier.folder)
        taken = sum(path.stat().st_blocks * 512 for path in tier.folder.iterdir())
        assert 64 * KV_FORMAT.block_bytes <= before <= taken <= room(64)
        for name in range(200):
            put(tier, key(name))
        assert folder_bytes(tier.folder) == before
        assert tier.stats().blocks == 64


def test_another_size_after_a_restart_keeps_what_still_lies_inside(tmp_path: Path) -> None:
    with opened(tmp_path, slots=4) as tier:
        for name in range(4):
            put(tier, key(name))
    with opened(tmp_path, slots=2) as tier:
        assert tier.holds(keys(0, 1, 2)) == 2
        assert folder_bytes(tier.folder) <= room(2)
    with opened(tmp_path, slots=8) as tier:
        assert tier.stats().slots == 8
        assert tier.holds(keys(0, 1, 2)) == 2
        assert got(tier, key(1))


def test_two_nodes_never_share_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as first, opened(tmp_path) as second:
        assert put(first, key(1))
        assert not put(second, key(2))
        assert (second.stats().on, second.holds(keys(1))) == (False, 0)
        assert [record.error for record in caplog.records if record.levelname == "WARNING"] == [  # type: ignore[attr-defined]
            f"[Errno 11] another store node uses this folder: '{second.folder}'"
        ]


def test_nobody_else_can_read_the_blocks(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        assert tier.folder.stat().st_mode & 0o077 == 0
        assert all(path.stat().st_mode & 0o077 == 0 for path in tier.folder.iterdir())


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    tier.folder.mkdir()
    tier.folder.chmod(0o777)
    tier.open()
    assert not tier.stats().on


def use(directory: Path, order: list[int]) -> None:
    """Write a block of each format; the later ones are used later."""
    for age, each in enumerate(order):
        with opened(directory, 4, OTHERS[each]) as tier:
            put(tier, key(each))
        for path in tier.folder.iterdir():
            os.utime(path, (1_000 + age, 1_000 + age))


def kept(directory: Path) -> set[int]:
    return {name for name, each in enumerate(OTHERS) if (directory / each.digest.hex()).exists()}


def test_folders_of_other_formats_stay_while_all_have_room(tmp_path: Path) -> None:
    use(tmp_path, [0, 1, 2])
    with opened(tmp_path, 4, total_bytes=4 * room(4)) as tier:
        assert put(tier, key(1))
    assert kept(tmp_path) == {0, 1, 2}
    with opened(tmp_path, 4, OTHERS[1]) as tier:
        assert got(tier, key(1))


@pytest.mark.parametrize(("order", "left"), [([0, 1, 2], {2}), ([2, 1, 0], {0}), ([1, 2, 0], {0})])
def test_the_least_recently_used_folders_leave_first(tmp_path: Path, order: list[int], left: set[int]) -> None:
    use(tmp_path, order)
    with opened(tmp_path, 4, total_bytes=2 * room(4)):
        assert kept(tmp_path) == left


def test_a_folder_in_use_stays_and_leaves_less_room(tmp_path: Path) -> None:
    with opened(tmp_path, 4, OTHERS[0]) as other, opened(tmp_path, 4, total_bytes=2 * room(4) - 4_096) as tier:
        put(other, key(1))
        assert got(other, key(1))
        assert 0 < tier.stats().slots < 4 + 1
        assert folder_bytes(other.folder) + folder_bytes(tier.folder) <= 2 * room(4) - 4_096
        with opened(tmp_path, 4, OTHERS[1], total_bytes=room(4)) as third:
            assert not third.stats().on  # no room is left
    assert kept(tmp_path) == {0, 1}


def test_files_that_the_tier_did_not_make_are_never_removed(tmp_path: Path) -> None:
    use(tmp_path, [0])
    notes = [tmp_path / "notes.txt", tmp_path / ("a" * 32), tmp_path / OTHERS[0].digest.hex() / "mine"]
    notes[1].mkdir()
    (tmp_path / ("b" * 32)).symlink_to(notes[1])
    (notes[1] / "blocks.txt").touch()
    for path in (notes[0], notes[2]):
        path.touch()
    with opened(tmp_path, 4, total_bytes=room(4)) as tier:
        assert tier.stats().on
    assert all(path.exists() for path in notes)
    assert [path.name for path in notes[2].parent.iterdir()] == ["mine"]


def test_a_lock_is_free_once_its_descriptor_is_closed(tmp_path: Path) -> None:
    first = try_hold(tmp_path / "lock")
    assert first is not None
    assert try_hold(tmp_path / "lock") is None
    os.close(first)
    second = try_hold(tmp_path / "lock")
    assert second is not None
    os.close(second)


def test_tokens_of_a_partial_block_come_back(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        put(tier, key(3))
        assert tier.read(key(3), memoryview(bytearray(KV_FORMAT.block_bytes))) == tokens_of(key(3)) == 4


def test_a_piece_of_a_block_is_a_defect_of_the_caller(tmp_path: Path) -> None:
    with opened(tmp_path) as tier, pytest.raises(ValueError, match="4096 bytes, not 5"):
        tier.write(key(1), 1, memoryview(b"short"), lambda checksum: True)


def test_settings_of_the_disk_are_checked_and_bound_all_formats() -> None:
    assert DiskSettings(disk_bytes=10).limits.total_bytes == 20
    assert DiskSettings(disk_bytes=10, disk_total_bytes=10).limits.total_bytes == 10
    for wrong in ({"disk_bytes": 0}, {"disk_queue": 0}, {"disk_retry_seconds": 0}, {"disk_total_bytes": 5}):
        with pytest.raises(InvalidSetting):
            DiskSettings(**wrong)  # type: ignore[arg-type]
