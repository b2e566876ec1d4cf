"""The disk tier under any sequence of writes, reads, restarts and damage: right bytes or a miss, within its room."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.disks import disk, flip, folder_bytes, got, put, room
from tests.support.stores import key
from twostroke.kv.tiers import folders

NAMES = st.integers(0, 8)
FILES = st.sampled_from([folders.HEADERS, folders.BLOCKS])
SHARE = st.floats(0, 1, exclude_max=True)


class DiskMachine(RuleBasedStateMachine):
    """While nobody damages the files, what the tier says that it holds can be read, and is there after a restart."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.slots = 4
        self.tier = disk(self.directory, self.slots)
        self.tier.open()
        self.damaged = False

    def held(self) -> set[int]:
        return {name for name in range(9) if self.tier.holds([key(name)])}

    @rule(name=NAMES)
    def write(self, name: int) -> None:
        assert put(self.tier, key(name))
        assert name in self.held()

    @rule(name=NAMES)
    def write_what_changes_meanwhile(self, name: int) -> None:
        was = name in self.held()
        assert put(self.tier, key(name), intact=lambda checksum: False) == was
        assert (name in self.held()) == was

    @rule(name=NAMES)
    def read(self, name: int) -> None:
        was = name in self.held()
        came = got(self.tier, key(name))  # the right bytes, or it fails
        assert came == was or (was and self.damaged)
        assert came == (name in self.held())

    @rule(slots=st.integers(1, 6))
    def restart(self, slots: int) -> None:
        before = self.held()
        self.tier.close()
        self.tier = disk(self.directory, slots)
        self.tier.open()
        if not self.damaged:
            assert self.held() <= before
            if slots >= self.slots:
                assert self.held() == before
        self.slots = slots

    @rule(name=FILES, share=SHARE, mask=st.integers(1, 255))
    def a_byte_flips(self, name: str, share: float, mask: int) -> None:
        size = (self.tier.folder / name).stat().st_size
        if size:
            flip(self.tier, name, int(share * size), mask)
            self.damaged = True

    @rule(name=FILES, share=SHARE)
    def a_file_is_cut_short(self, name: str, share: float) -> None:
        size = (self.tier.folder / name).stat().st_size
        os.truncate(self.tier.folder / name, int(share * size))
        self.damaged = True

    @rule(one=st.integers(0, 5), other=st.integers(0, 5))
    def two_slots_change_places(self, one: int, other: int) -> None:
        """As a disk does that writes to the wrong place."""
        with (self.tier.folder / folders.HEADERS).open("r+b") as file:
            raw = file.read()
            a, b = (raw[at * 64 : at * 64 + 64] for at in (one, other))
            if len(a) == len(b) == 64:
                file.seek(one * 64)
                file.write(b)
                file.seek(other * 64)
                file.write(a)
        self.damaged = True

    @invariant()
    def it_keeps_within_its_room(self) -> None:
        stats = self.tier.stats()
        assert (stats.on, stats.failures, stats.slots) == (True, 0, self.slots)
        assert stats.blocks == len(self.held()) <= stats.slots
        assert folder_bytes(self.tier.folder) <= room(self.slots)

    def teardown(self) -> None:
        self.tier.close()
        shutil.rmtree(self.directory)


DiskMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_disk = DiskMachine.TestCase
