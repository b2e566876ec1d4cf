"""A disk that fails costs the disk tier, never a wrong block and never an error; a killed node leaves whole blocks."""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.disks import (
    LARGE,
    RETRY_SECONDS,
    descriptor_replaced,
    disk,
    folder_bytes,
    got,
    opened,
    put,
    room,
)
from tests.support.stores import Clock, key, keys
from twostroke.kv.tiers.disk import DiskTier
from twostroke.kv.tiers.slots import DiskSlots

ROOT = Path(__file__).parents[2]
KILLS = 20


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said about the tier going off and on."""
    return [f"{record.levelname} {record.message}" for record in caplog.records if "disk tier" in record.message]


def slots_of(tier: DiskTier) -> DiskSlots:
    assert tier._slots is not None
    return tier._slots


@contextmanager
def files_bounded(size: int) -> Iterator[None]:
    """This process may not write beyond so many bytes of any file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def goes_off_and_comes_back(tier: DiskTier, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """The tier has just failed; the disk works again."""
    assert (tier.stats().on, tier.stats().failures) == (False, 1)
    assert tier.holds(keys(1)) == 0
    assert not got(tier, key(1))
    clock.now += RETRY_SECONDS - 1
    assert not put(tier, key(1))
    assert not tier.stats().on  # it was left alone for as long as it was told
    clock.now += 1
    assert put(tier, key(1))
    assert got(tier, key(1))
    assert (tier.stats().on, tier.stats().failures) == (True, 1)
    assert [line.partition(" ")[0] for line in said(caplog)] == ["INFO", "WARNING", "INFO"]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def _log_of_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")


@pytest.mark.parametrize("cut", [4_096, 4_096 + 1_000], ids=["at the start", "in the middle"])
def test_a_write_that_the_system_refuses_turns_the_tier_off_for_a_while(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    with opened(tmp_path, clock=clock) as tier:
        put(tier, key(1))
        with files_bounded(cut):
            assert not put(tier, key(2))
        goes_off_and_comes_back(tier, clock, caplog)


@pytest.mark.parametrize("device", ["/dev/full", "/proc/self/mem"], ids=["no room", "input/output error"])
@pytest.mark.parametrize("file", ["_blocks", "_headers"])
def test_a_disk_that_takes_no_more_turns_the_tier_off_for_a_while(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, file: str, device: str
) -> None:
    with opened(tmp_path, clock=clock) as tier:
        put(tier, key(1))
        with descriptor_replaced(getattr(slots_of(tier), file).descriptor, device):
            assert not put(tier, key(2))
        goes_off_and_comes_back(tier, clock, caplog)


def test_a_block_that_cannot_be_read_turns_the_tier_off_once_and_is_gone_afterwards(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, clock=clock) as tier:
        put(tier, key(1))
        put(tier, key(2))
        with descriptor_replaced(slots_of(tier)._blocks.descriptor, "/proc/self/mem"):
            assert not got(tier, key(1))
        assert not tier.stats().on
        clock.now += RETRY_SECONDS
        put(tier, key(3))
        assert [tier.holds(keys(name)) for name in (1, 2, 3)] == [0, 1, 1]


def test_a_removed_directory_is_made_again_after_a_while(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path / "kv", clock=clock) as tier:
        put(tier, key(2))
        shutil.rmtree(tmp_path / "kv")
        assert got(tier, key(2))  # its bytes are still there
        assert not put(tier, key(3))
        goes_off_and_comes_back(tier, clock, caplog)
        assert tier.folder.is_dir()
        assert tier.holds(keys(2)) == 0


def test_a_failure_that_lasts_is_said_once(tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with opened(tmp_path / "file", clock=clock) as tier:
        for _ in range(5):
            clock.now += RETRY_SECONDS
            assert not put(tier, key(1))
        assert tier.stats().failures == 1
        assert said(caplog) == ["WARNING the disk tier is off; blocks stay in the arena alone"]
        (tmp_path / "file").unlink()
        clock.now += RETRY_SECONDS
        assert put(tier, key(1))


def test_room_for_not_even_one_block_is_said_and_leaves_the_tier_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, slots=0) as tier:
        assert not tier.stats().on
    assert [record.error for record in caplog.records if record.levelname == "WARNING"] == [  # type: ignore[attr-defined]
        f"[Errno 28] 4096 bytes have no room for a block of 4096: '{tier.folder}'"
    ]


def test_a_node_takes_over_when_the_one_before_it_has_ended(tmp_path: Path, clock: Clock) -> None:
    with opened(tmp_path) as before:
        put(before, key(1))
        after = disk(tmp_path, clock=clock)
        after.open()
        assert not put(after, key(2))
    clock.now += RETRY_SECONDS
    assert put(after, key(2))
    assert after.holds(keys(1, 2)) == 2
    after.close()


def test_no_descriptor_is_left_by_failures(tmp_path: Path, clock: Clock) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = open_files()
    with opened(tmp_path, clock=clock) as tier:
        for name in range(5):
            with descriptor_replaced(slots_of(tier)._blocks.descriptor, "/dev/full"):
                put(tier, key(name))
            assert open_files() == before
            clock.now += RETRY_SECONDS
            put(tier, key(name))
            disk(tmp_path).open()  # another node, in vain
            assert open_files() == before + 3
    assert open_files() == before


MOUNTED = """
import logging, subprocess, sys
from pathlib import Path
from tests.support.disks import disk, got, put, room, RETRY_SECONDS
from tests.support.stores import Clock, key
logging.basicConfig(format="%(levelname)s %(error)s")
directory, clock = Path(sys.argv[1]), Clock()
def mount(*options): subprocess.run(["mount", *options, str(directory)], check=True)
mount("-t", "tmpfs", "-o", sys.argv[2], "none")
tier = disk(directory, 64, clock=clock)
tier.open()
assert not put(tier, key(1)) and not tier.stats().on
free = subprocess.run(["df", "--output=used", str(directory)], check=True, capture_output=True, text=True)
assert int(free.stdout.split()[1]) < 16, free.stdout
mount("-o", "remount,rw,size=1m")
clock.now += RETRY_SECONDS
assert put(tier, key(1)) and got(tier, key(1))
"""


@pytest.mark.parametrize(
    ("options", "error"),
    [("size=128k", "No space left on device"), ("ro,size=1m", "Read-only file system")],
    ids=["too small", "read-only"],
)
def test_a_file_system_without_room_is_found_out_at_open_and_left_as_it_was(
    tmp_path: Path, options: str, error: str
) -> None:
    namespace = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    command = [*namespace, sys.executable, "-c", MOUNTED, str(tmp_path), options]
    ended = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    warnings = [line for line in ended.stderr.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 1
    assert error in warnings[0]


def test_a_node_killed_in_the_middle_of_writing_leaves_whole_blocks_only(tmp_path: Path) -> None:
    code = "import sys; from tests.support.disks import write_until_killed; write_until_killed(*sys.argv[1:])"
    draw, first, survivors = random.Random(1), 0, 0
    for _ in range(KILLS):
        command = [sys.executable, "-c", code, str(tmp_path), str(first)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            written = draw.randrange(1, 12)
            for _ in range(written):
                assert writer.stdout.readline()
            writer.kill()
        first += written
        with opened(tmp_path, 3, LARGE) as tier:
            held = [name for name in range(first + 1_000) if tier.holds(keys(name))]
            for name in held:
                assert got(tier, key(name), LARGE.block_bytes)  # the right bytes, or it fails
            assert len(held) >= min(written, 3) - 1  # all but the one that was being replaced
            assert (tier.stats().blocks, tier.stats().damaged) == (len(held), 0)
            assert folder_bytes(tier.folder) <= room(3, LARGE)
            survivors += len(held)
    assert survivors >= KILLS
