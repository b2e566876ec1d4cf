"""When threads that rest are asked to come again: what others leave of the processors."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
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

int look(double *idle, double *all) {
    const machine_time seen = look_at_machine();
    *idle = seen.idle, *all = seen.all;
    return seen.own > 0 && seen.at > 0;
}
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


def test_the_system_is_read_for_the_allowed_processors(library: ctypes.CDLL) -> None:
    idle, busy_or_idle = ctypes.c_double(), ctypes.c_double()
    assert library.look(ctypes.byref(idle), ctypes.byref(busy_or_idle))
    assert 0 <= idle.value <= busy_or_idle.value
