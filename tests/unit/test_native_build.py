"""How the kernels are compiled, and when again."""

from __future__ import annotations

import os
import select
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.backends import native_backend
from twostroke.engine.native import build
from twostroke.engine.native.build import Unavailable, load_kernels

START = "from twostroke.engine.native.build import load_kernels; load_kernels().add(0, 0, 0)"
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "zeroed": lambda content: bytes(len(content)),
    "cut": lambda content: content[: len(content) // 2],
    "cut within a page": lambda content: content[:1_000],
    "written in part": lambda content: content[: len(content) // 2] + bytes(len(content) - len(content) // 2),
    "another bit": lambda content: content[:5_000] + bytes([content[5_000] ^ 1]) + content[5_001:],
    "longer": lambda content: content + b"more",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the kernels of this test lie; its compiler is quick, and told more by MORE."""
    native_backend()  # skips where nothing compiles
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho >> {tmp_path}/compiled\nexec cc "$@" -O0 $MORE\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", str(compiler))
    return tmp_path / "native"


def compiled(folder: Path) -> int:
    return len((folder.parent / "compiled").read_text().splitlines())


def start() -> int:
    """Load the kernels in a process of their own, which damaged ones may end."""
    return subprocess.run([sys.executable, "-c", START], cwd=Path(__file__).parents[2], timeout=60).returncode


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_start_heals_a_damaged_file(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    assert start() == 0
    (made,) = folder.iterdir()
    sound = made.read_bytes()
    made.write_bytes(damage(sound))
    assert start() == 0
    assert start() == 0
    assert made.read_bytes() == sound
    assert compiled(folder) == 2


def test_a_start_heals_a_sound_file_that_cannot_be_loaded_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent / "gone.h").write_text(
        "int of_another_library(void); int with_it(void) { return of_another_library(); }"
    )
    monkeypatch.setenv("MORE", f"-include {folder.parent / 'gone.h'}")
    with pytest.raises(Unavailable, match="of_another_library"):
        load_kernels()
    monkeypatch.setenv("MORE", "")
    load_kernels()
    load_kernels()
    assert compiled(folder) == 2


def test_nothing_that_a_compiler_started_outlives_its_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, compiler = folder.parent / "pipe", folder.parent / "compiler"
    os.mkfifo(pipe)
    compiler.write_text(f"#!/bin/sh\nexec 3> {pipe}\necho begun >&3\nsleep 600 &\nsleep 600\n")
    monkeypatch.setattr(build, "_COMPILE_SECONDS", 2.0)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(Unavailable, match="timed out"):
            load_kernels()
        assert os.read(reader, 100) == b"begun\n"
        assert select.select([reader], [], [], 20.0)[0], "a process still holds the pipe"
        assert os.read(reader, 100) == b""  # the last one that held it has ended
    finally:
        os.close(reader)
    assert list(folder.iterdir()) == []


def test_a_folder_that_others_can_write_to_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native_backend()  # skips where nothing compiles
    folder = tmp_path / "native"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    with pytest.raises(Unavailable, match="written to by others"):
        load_kernels()


def test_the_kernels_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native_backend()
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    load_kernels()
    (made,) = (tmp_path / "native").iterdir()
    before = made.stat()
    load_kernels()
    assert [made.stat().st_mtime_ns, made.stat().st_ino] == [before.st_mtime_ns, before.st_ino]
    assert stat.S_IMODE((tmp_path / "native").stat().st_mode) == 0o700


def test_the_compiler_may_be_a_command_of_several_words_and_is_asked_again_once_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native_backend()
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nexec cc "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", f"env -u UNUSED '{compiler}'")
    for made in 1, 1, 2:
        if made == 2:
            os.utime(compiler, (0, 0))
        load_kernels()
        assert len(list((tmp_path / "native").iterdir())) == made


@pytest.mark.parametrize("compiler", ["/does/not/exist", "false", "'"])
def test_without_a_working_compiler_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(
        Unavailable, match="x86_64" if os.uname().machine != "x86_64" else "could not be built|no command"
    ):
        load_kernels()
    assert list((tmp_path / "native").glob("*")) == []
