"""When threads that rest are asked to come again: what others leave of the processors."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import twostroke.engine.native

KERNELS = Path(twostroke.engine.native.__file__).parent / "kernels"
SOURCE = """
#define _GNU_SOURCE
#include "idle.h"

int left(double idle, double all, double own, double since) {
    const machine_time before = {100, 400, 7, 1000}, after = {100 + idle, 400 + all, 7 + own, 1000 + since};
    return others_left_idle(&before, &after, 0.4);
}

int machine_is_read(void) { return look_at_machine().all > 0; }

void count(const char *path, double *idle, double *all) { count_ticks(path, idle, all); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("no C compiler is on the PATH")
    folder = tmp_path_factory.mktemp("idle")
    source, made = folder / "idle.c", folder / "idle.so"
    source.write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", f"-I{KERNELS}", str(source), "-o", str(made)], check=True, timeout=60)
    return ctypes.CDLL(str(made))


@pytest.fixture
def left(library: ctypes.CDLL) -> Callable[..., bool]:
    library.left.argtypes = (ctypes.c_double,) * 4
    return lambda *, idle, passed, own, since=2.0: bool(library.left(idle, passed, own, since))


def test_a_processor_that_others_leave_idle_is_seen(left: Callable[..., bool]) -> None:
    assert left(idle=1.0, passed=4.0, own=2.0)
    assert not left(idle=0.2, passed=4.0, own=2.0)


def test_the_own_waiting_for_work_leaves_no_processor_idle(left: Callable[..., bool]) -> None:
    assert not left(idle=1.0, passed=4.0, own=1.0)
    assert left(idle=2.0, passed=4.0, own=1.0)
    assert left(idle=1.0, passed=4.0, own=3.0)  # computed on more than one


def test_clocks_that_stand_still_keep_no_thread_away(left: Callable[..., bool]) -> None:
    assert left(idle=0.0, passed=0.0, own=2.0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is read")
def test_the_ticks_of_the_allowed_processors_are_added_up_and_no_others(library: ctypes.CDLL, tmp_path: Path) -> None:
    mine = os.sched_getaffinity(0)
    numbers = range(max(mine) + 3)  # the last two are nobody's
    ticks = {number: (7 * number + 1, 0, 100 + number, 1_000 * number + 400, 30) for number in numbers}
    assert counted(library, tmp_path, ticks, mine) == expected(ticks, mine)
    for one in mine:
        try:
            os.sched_setaffinity(0, {one})
            assert counted(library, tmp_path, ticks, {one}) == expected(ticks, {one})
        finally:
            os.sched_setaffinity(0, mine)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is read")
def test_the_system_is_asked_and_may_say_nothing(library: ctypes.CDLL, tmp_path: Path) -> None:
    assert bool(library.machine_is_read()) == (count(library, Path("/proc/stat"))[1] > 0)
    for text in "", "intr 5 6 7 8 9 10\n", "cpu0 1 2 3\n", "cpu":
        assert read(library, tmp_path, text) == (0, 0)


Ticks = Mapping[int, tuple[int, ...]]  # user, nice, system, idle, waiting, by processor


def expected(ticks: Ticks, allowed: set[int]) -> tuple[float, float]:
    """What is idle, and all."""
    return sum(sum(ticks[each][3:]) for each in allowed), sum(sum(ticks[each]) for each in allowed)


def counted(library: ctypes.CDLL, folder: Path, ticks: Ticks, allowed: set[int]) -> tuple[float, float]:
    """What is read off a /proc/stat whose line for all together begins with the number of an allowed processor."""
    lines = [f"cpu  {min(allowed)} 0 400 9000 50 0 0 0 0 0"]
    lines += [f"cpu{number} {' '.join(map(str, each))} 5 5 0 0 0" for number, each in ticks.items()]
    return read(library, folder, "\n".join([*lines, "intr 38 0 9", "ctxt 99", ""]))


def read(library: ctypes.CDLL, folder: Path, text: str) -> tuple[float, float]:
    (folder / "stat").write_text(text)
    return count(library, folder / "stat")


def count(library: ctypes.CDLL, path: Path) -> tuple[float, float]:
    idle, all_ticks = ctypes.c_double(), ctypes.c_double()
    library.count(str(path).encode(), ctypes.byref(idle), ctypes.byref(all_ticks))
    return idle.value, all_ticks.value
