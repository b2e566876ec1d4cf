"""How much of the machine others used meanwhile. Figures taken beside other work are worth little.

A peer whose threads spin until all have arrived loses nearly everything when one of them has to share its core, so a
comparison on a machine that is not quiet flatters whoever waits politely.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

MOST_CORES = 0.15  # used by others: more, and the figures are marked

_TICK = float(os.sysconf("SC_CLK_TCK"))
_IDLE = (3, 4)  # columns of /proc/stat's first line: idle, and waiting for a disk
_COLUMNS = 8  # the following ones are counted in the first two


class Quiet:
    """Tells, since it was made, how many cores worked for others than this process and a server that it started."""

    def __init__(self) -> None:
        self._began, self._busy, self._ours = time.monotonic(), _busy_seconds(), _seconds_of([os.getpid()])

    def others_cores(self, server: Iterable[int]) -> float:
        """Cores kept busy by others, or taken by the host of this virtual machine.

        Args:
            server: process ids of the server; it started after this was made, and is still there.
        """
        ours = _seconds_of([os.getpid()]) - self._ours + _seconds_of(server)
        return max(0.0, _busy_seconds() - self._busy - ours) / (time.monotonic() - self._began)


def _busy_seconds() -> float:
    """Seconds of all cores that were not idle, since the machine started."""
    columns = [int(word) for word in Path("/proc/stat").read_text().split(maxsplit=_COLUMNS + 1)[1 : _COLUMNS + 1]]
    return sum(ticks for column, ticks in enumerate(columns) if column not in _IDLE) / _TICK


def _seconds_of(pids: Iterable[int]) -> float:
    """Seconds that processes have used, with those of their children that have ended."""
    ticks = 0
    for pid in pids:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:  # it has ended; its parent's account has it
            continue
        ticks += sum(map(int, stat.rpartition(")")[2].split()[11:15]))
    return ticks / _TICK
