"""How much memory is left to this process, before the kernel ends it for want of more."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path


def free_bytes(*, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the least that the machine, or a control group (version 2) around this process, says it has left."""
    return min((_machine(proc), *map(_left, _around(proc, groups))))


def _machine(proc: Path) -> float:
    with contextlib.suppress(OSError, KeyError, ValueError, IndexError):
        return int(_table(proc / "meminfo")["MemAvailable:"]) * 1024
    return math.inf


def _around(proc: Path, groups: Path) -> Iterator[Path]:
    """Yield the folders of the process's own group and of those it lies in; in a container the outermost is its own."""
    with contextlib.suppress(OSError, StopIteration):
        lines = (proc / "self" / "cgroup").read_text().splitlines()
        own = groups / next(line for line in lines if line.startswith("0::")).removeprefix("0::").lstrip("/")
        while own.is_relative_to(groups):
            yield own
            own = own.parent


def _left(group: Path) -> float:
    """A group's limit less what it uses; files that were read count as free, since they can be read again."""
    with contextlib.suppress(OSError, KeyError, ValueError, IndexError):
        used, stat = int((group / "memory.current").read_text()), _table(group / "memory.stat")
        files = int(stat["inactive_file"]) + int(stat["active_file"])
        return int((group / "memory.max").read_text()) - used + files  # "max" is no number, and no limit
    return math.inf


def _table(path: Path) -> dict[str, str]:
    return {words[0]: words[1] for words in map(str.split, path.read_text().splitlines())}
