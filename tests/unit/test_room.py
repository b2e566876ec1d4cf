"""What is left of memory: of the machine's, and of the groups that a container puts around a process."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from twostroke.engine.native.room import free_bytes


def written(folder: Path, files: Mapping[str, str]) -> dict[str, Path]:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {"proc": folder / "proc", "groups": folder / "groups"}


def group(name: str, limit: str, used: int, files: int = 0) -> dict[str, str]:
    return {
        f"groups/{name}memory.max": f"{limit}\n",
        f"groups/{name}memory.current": f"{used}\n",
        f"groups/{name}memory.stat": f"anon 1\ninactive_file {files}\nactive_file 5\n",
    }


MACHINE = {"proc/meminfo": "MemTotal:  9 kB\nMemAvailable:  8 kB\n"}


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, math.inf),
        (MACHINE, 8192),
        (MACHINE | {"proc/self/cgroup": "0::/\n"} | group("", "max", 100), 8192),
        (MACHINE | {"proc/self/cgroup": "0::/\n"} | group("", "7000", 3000, files=1000), 5005),
        (
            MACHINE | {"proc/self/cgroup": "1:cpu:/x\n0::/a/b\n"} | group("a/", "700", 300) | group("a/b/", "max", 300),
            405,
        ),
        (MACHINE | {"proc/self/cgroup": "0::/gone\n"}, 8192),
        (MACHINE | {"proc/self/cgroup": "4:memory:/only/version/1\n"}, 8192),
        ({"proc/meminfo": "nonsense\n"}, math.inf),
    ],
)
def test_the_least_that_any_limit_leaves_is_free(tmp_path: Path, files: Mapping[str, str], left: float) -> None:
    assert free_bytes(**written(tmp_path, files)) == left


def test_this_machine_has_some_left() -> None:
    assert free_bytes() > 1 << 20
