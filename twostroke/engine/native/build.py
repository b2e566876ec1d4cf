"""Compiles the kernels for this very processor, once; every later start finds the file."""

from __future__ import annotations

import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

from twostroke.engine.native.library import Library
from twostroke.folders import cache_folder, make_private, sync_folder

_log = logging.getLogger(__name__)
_SOURCES = Path(__file__).parent / "kernels"
_FLAGS = ("-O3", "-fno-math-errno", "-shared", "-fPIC", "-pthread")
_COMPILE_SECONDS = 60.0
_SEAL_BYTES = 16


class Unavailable(Exception):
    """The kernels cannot run here; the message says why."""


def load_kernels(processor: str = "native") -> Library:
    """Compile the kernels unless that was done before, and load them.

    `processor` is a name that the compiler knows: this very one, or a level such as x86-64-v3 (AVX2).

    The file lies in `native` of the cache folder (TWOSTROKE_CACHE, else XDG_CACHE_HOME/twostroke, else
    ~/.cache/twostroke), which must belong to this user alone, under a name made of all that goes into it. Two processes
    that compile at once each write a file of their own; the last one to finish stays. A file that is damaged, or that
    cannot be loaded, is made anew.

    Raises:
        Unavailable: another kind of processor, no compiler, no place to write, or the compiler failed.
    """
    if platform.machine() != "x86_64":
        raise Unavailable(f"the kernels are written for x86_64, not {platform.machine()}")
    compiler = _compiler()
    try:
        folder = cache_folder(os.environ) / "native"
        make_private(folder)  # what lies in it becomes code of this process
        path = folder / f"{_fingerprint(compiler, processor)}.so"
        if _is_whole(path):
            with suppress(OSError):  # made beside another C library, say
                return Library(path)
        _compile(compiler, processor, path)
        return Library(path)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"the kernels could not be built: {_shown(error)}") from error


def _compiler() -> tuple[str, ...]:
    """Return the command that CC names, which may have arguments and be behind another, or the first usual one."""
    try:
        told = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise Unavailable(f"CC names no command: {error}") from error
    command = told or [name for name in ("cc", "gcc", "clang") if shutil.which(name)][:1]
    if not command:
        raise Unavailable("no C compiler is on the PATH")
    return tuple(command)


def _fingerprint(compiler: Sequence[str], processor: str) -> str:
    digest = blake2b(digest_size=16)
    for part in (*compiler, *_versions(compiler), processor, *_FLAGS, _features()):
        digest.update(part.encode() + b"\0")
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _versions(compiler: Sequence[str]) -> Iterator[str]:
    """Yield what changes when one of the programs is upgraded, without starting it."""
    for path in filter(None, map(shutil.which, compiler)):
        status = Path(path).stat()
        yield f"{Path(path).resolve()} {status.st_size} {status.st_mtime_ns}"


def _features() -> str:
    """Return what this processor can do, as Linux tells it; elsewhere its name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("flags")), platform.processor())


def _compile(compiler: Sequence[str], processor: str, path: Path) -> None:
    with _temporary(path) as made:
        _log.info("compiling the kernels for this processor (%s)", processor)
        _run((*compiler, f"-march={processor}", *_FLAGS, str(_SOURCES / "kernels.c"), "-o", str(made), "-lm"))
        _seal(made)
        made.replace(path)
        sync_folder(path.parent)


def _run(command: Sequence[str]) -> None:
    """Run a command that starts others, as compilers do; none of them outlives the call."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    ) as running:
        try:
            _, errors = running.communicate(timeout=_COMPILE_SECONDS)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            raise
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, command, stderr=errors)


def _seal(path: Path) -> None:
    """Append the digest of a library, which loaders do not look at, and bring all to the disk."""
    with path.open("rb+") as file:
        file.write(_digest(file.read()))
        file.flush()
        os.fsync(file.fileno())


def _is_whole(path: Path) -> bool:
    """Whether a library is there as it was sealed: to load a part of one may end the process, by SIGBUS."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return content[-_SEAL_BYTES:] == _digest(content[:-_SEAL_BYTES])


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_SEAL_BYTES).digest()


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    number, name = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(number)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _shown(error: Exception) -> str:
    output = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else ""
    return next((line for line in output.splitlines() if "error" in line), str(error))
