"""Child: one process of the plan, started again when it dies, until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Callable, Mapping
from pathlib import Path

import twostroke
from twostroke.launcher.backoff import Backoff
from twostroke.launcher.journal import Journal, Line
from twostroke.launcher.plan import ChildSpec
from twostroke.launcher.priority import lower

MAX_LINE_BYTES = 1 << 20
MISUSED = 2  # exit status of a service that was told something wrong: it would say the same again
KILL_SECONDS = 5.0
# `python -m` looks for modules where it runs first: there, a `services` folder of the user cannot stand in for ours.
PACKAGE_HOME = Path(twostroke.__file__).resolve().parents[1]


class GaveUp(Exception):
    """A process died again and again, or said that it cannot run as told."""

    def __init__(self, message: str, cure: str, *, misused: bool) -> None:
        super().__init__(message)
        self.cure = cure
        self.misused = misused


class Child:
    """Keeps one process alive.

    Args:
        hears: called with every line that the process writes.
        reports: called with one line whenever the process dies and will be started again.
    """

    def __init__(
        self, spec: ChildSpec, journal: Journal, hears: Callable[[Child, Line], None], reports: Callable[[str], None]
    ) -> None:
        self.spec = spec
        self._journal = journal
        self._hears = hears
        self._reports = reports
        self._backoff = Backoff()
        self._process: Process | None = None
        self._serving = False
        self._ever_served = False
        self._told_to_stop = asyncio.Event()
        self._killed = False

    async def keep(self, environ: Mapping[str, str]) -> None:
        """Run the process until `stop`; start it again with growing pauses. Raises GaveUp."""
        clock = asyncio.get_running_loop().time
        while not self._told_to_stop.is_set():
            started = clock()
            status = await self._live(environ)
            if self._told_to_stop.is_set():
                return
            pause = self._pause_after(status, clock() - started)
            self._reports(f"{self.spec.name} {_ended(status)}; starting it again in {pause:g} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._told_to_stop.wait()

    async def stop(self, seconds: float) -> bool:
        """Let the process drain, for at most `seconds`, then kill it; says whether it ended by itself."""
        self._told_to_stop.set()
        process = self._process
        if process is None or process.returncode is not None:
            return True
        if process.stdin is not None:
            process.stdin.close()  # means drain, also to a process that is too young to handle signals
        if self.spec.role.is_worker and not self._serving:
            self._signal(signal.SIGTERM)  # holds nothing yet, and would go on loading
        try:
            async with asyncio.timeout(seconds):
                await process.wait()
        except TimeoutError:
            self.kill()
            async with asyncio.timeout(KILL_SECONDS):
                await process.wait()
        return not self._killed

    def kill(self) -> None:
        """End the process, and whatever it started, at once."""
        self._told_to_stop.set()
        self._killed = True
        self._signal(signal.SIGKILL)

    async def _live(self, environ: Mapping[str, str]) -> int:
        """One life of the process; returns its status."""
        self._serving = False
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            *self.spec.command,
            "--stop-with-stdin",
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            cwd=PACKAGE_HOME,
            env=environ,
            limit=MAX_LINE_BYTES,
            start_new_session=True,  # Ctrl-C in the terminal is for the launcher, which stops its children in order
        )
        if self._told_to_stop.is_set():  # while it was being started
            self.kill()
        jobs = [self._listen(process)]
        if self.spec.role.is_worker:
            jobs.append(lower(process.pid))
        try:
            await asyncio.gather(*jobs)
            return await process.wait()
        except asyncio.CancelledError:
            self._signal(signal.SIGKILL)
            raise

    async def _listen(self, process: Process) -> None:
        """Read what the process writes until it closes its output."""
        if process.stdout is None:  # pragma: no cover - asked for above
            return
        while True:
            try:
                raw = await process.stdout.readline()
            except ValueError:  # longer than MAX_LINE_BYTES; asyncio has dropped it
                raw = b"a line was too long to keep\n"
            if not raw:
                return
            line = self._journal.add(raw.rstrip(b"\r\n"))
            if line.event == "serving":
                self._serving = self._ever_served = True
            self._hears(self, line)

    def _pause_after(self, status: int, lived: float) -> float:
        last = self._journal.last_words()
        words = f"{self.spec.name} {_ended(status)}: {last.fields.get('error', last)}"
        cure = last.fields.get("cure") or f"read {self._journal.path}"
        if status == MISUSED:
            raise GaveUp(words, cure, misused=True)
        pause = self._backoff.after(lived, failed_start=status >= 0 and not self._ever_served)
        if pause is None:
            raise GaveUp(words, cure, misused=False)
        return pause

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    return f"was killed by {signal.Signals(-status).name}"
