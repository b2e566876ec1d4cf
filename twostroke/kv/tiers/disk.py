"""DiskTier: blocks in files of one format's folder, for as long as the disk works."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from twostroke.kv.format import KvFormat
from twostroke.kv.tiers import TierStats, folders
from twostroke.kv.tiers.files import OpenFile, TierFile
from twostroke.kv.tiers.slots import DiskSlots

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskLimits:
    """What the tier may take."""

    bytes: int  # of one format, reserved when it is opened
    total_bytes: int  # of all formats together; the least recently used others are removed at open
    retry_seconds: float  # after a failure, before the disk is tried again


class DiskTier:
    """See Tier. Turned off by any failure of the disk; the first write after `retry_seconds` tries again.

    Reads never try: they are in somebody's way. While the tier is off it holds nothing, so nobody asks for any.

    Args:
        clock: seconds that never run backwards.
        open_file: opens the tier's files.
    """

    def __init__(
        self,
        directory: Path,
        kv_format: KvFormat,
        limits: DiskLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        open_file: OpenFile = TierFile,
    ) -> None:
        self.folder = directory / kv_format.digest.hex()
        self._block_bytes = kv_format.block_bytes
        self._limits = limits
        self._clock = clock
        self._open_file = open_file
        self._lock: int | None = None
        self._slots: DiskSlots | None = None
        self._retry_at: float | None = None  # while a failure keeps the tier off
        self._failures = 0
        self._damaged = 0  # in files that are closed

    def open(self) -> None:
        """See Tier."""
        try:
            self._open()
        except OSError as error:
            self._turn_off(error)

    def holds(self, keys: Iterable[bytes]) -> int:
        """See Tier."""
        slots, held = self._slots, 0
        if slots is not None:
            for key in keys:
                if key not in slots.index:
                    break
                held += 1
        return held

    def read(self, key: bytes, into: memoryview) -> int | None:
        """See Tier."""
        if self._slots is None:
            return None
        try:
            return self._slots.read(key, into)
        except OSError as error:
            self._turn_off(error)
            return None

    def write(self, key: bytes, tokens: int, data: memoryview, intact: Callable[[int], bool]) -> bool:
        """See Tier."""
        if self._retry_at is not None and self._clock() >= self._retry_at:
            self.open()
        if self._slots is None:
            return False
        try:
            return self._slots.write(key, tokens, data, intact)
        except OSError as error:
            self._turn_off(error)
            return False

    def close(self) -> None:
        """See Tier."""
        self._retry_at = None
        self._close_files()

    def stats(self) -> TierStats:
        """See Tier."""
        slots = self._slots
        return TierStats(
            on=slots is not None,
            slots=slots.index.slots if slots else 0,
            blocks=len(slots.index) if slots else 0,
            failures=self._failures,
            damaged=self._damaged + (slots.damaged if slots else 0),
        )

    def _open(self) -> None:
        self._lock = folders.claim(self.folder)
        os.utime(self._lock)  # the folder that was used last leaves last
        others = folders.make_room(self.folder, self._limits.total_bytes - self._limits.bytes)
        most = min(self._limits.bytes, self._limits.total_bytes - others)
        self._slots = DiskSlots(self.folder, self._block_bytes, most, self._open_file)
        self._retry_at = None
        log.info("the disk tier is on", extra={"folder": str(self.folder), "blocks": len(self._slots.index)})

    def _turn_off(self, error: OSError) -> None:
        """Do without the disk for a while. A row of failures is said once."""
        if self._retry_at is None:
            facts = {"folder": str(self.folder), "error": str(error), "retry_seconds": self._limits.retry_seconds}
            log.warning("the disk tier is off; blocks stay in the arena alone", extra=facts)
            self._failures += 1
        self._retry_at = self._clock() + self._limits.retry_seconds
        self._close_files()

    def _close_files(self) -> None:
        slots, self._slots = self._slots, None
        lock, self._lock = self._lock, None
        with contextlib.suppress(
            OSError
        ):  # a disk that failed may fail here again; the descriptors are free all the same
            if slots is not None:
                self._damaged += slots.damaged
                slots.close()
        if lock is not None:
            os.close(lock)
