"""Supervisor: starts a plan, keeps it running, and takes it apart in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from twostroke.folders import CACHE_VARIABLE
from twostroke.launcher.child import Child, GaveUp
from twostroke.launcher.journal import Journal, Line
from twostroke.launcher.options import UpOptions
from twostroke.launcher.plan import ChildSpec, Role, Site
from twostroke.launcher.progress import Progress
from twostroke.settings import PREFIX

# A process that is draining may take its full time, then ends its calls and flushes its traces.
MARGIN_SECONDS = 8.0
KILLED_STATUS = 130
WAITING_SECONDS = 10.0  # between two lines about a start that takes its time
# The doors close first, so that open answers can finish with everything they need still there.
STOP_ORDER = ((Role.ROUTER,), (Role.PREFILL, Role.DECODE), (Role.KVSTORE,))


class Supervisor:
    """Runs one cluster.

    Args:
        site: shown in the ready line.
        logs: folder of one log file for each process.
    """

    def __init__(self, options: UpOptions, site: Site, logs: Path, progress: Progress) -> None:
        self._options = options
        self._site = site
        self._logs = logs
        self._progress = progress
        self._stopping = asyncio.Event()
        self._failure: GaveUp | None = None
        self._children: tuple[Child, ...] = ()
        self._weights = ""  # as workers tell it: where none are asked for, it is up to their device

    async def run(self, specs: Sequence[ChildSpec], environ: Mapping[str, str]) -> int:
        """Run until SIGINT, SIGTERM or SIGHUP; returns the exit status. A second signal kills what is left.

        Raises: GaveUp, once all is taken apart, when a process could not be kept alive.
        """
        loop = asyncio.get_running_loop()
        ends = [signal.SIGINT, signal.SIGTERM]  # also where SIGINT is ignored, as in background jobs of a shell
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            ends.append(signal.SIGHUP)
        for number in ends:
            loop.add_signal_handler(number, self._on_signal)
        with ExitStack() as files:
            journals = [files.enter_context(Journal(self._logs / f"{spec.name}.log")) for spec in specs]
            self._children = tuple(
                Child(spec, journal, self._hear, self._progress.note)
                for spec, journal in zip(specs, journals, strict=True)
            )
            async with asyncio.TaskGroup() as tasks:
                for child in self._children:
                    tasks.create_task(self._keep(child, environ), name=child.spec.name)
                await self._until_stopping()
                clean = await self._take_apart()
        if self._failure is not None:
            raise self._failure
        return 0 if clean else KILLED_STATUS

    async def _until_stopping(self) -> None:
        self._progress.starting([child.spec.name for child in self._children], self._site, self._logs)
        while not self._progress.is_ready:
            try:
                async with asyncio.timeout(WAITING_SECONDS):
                    await self._stopping.wait()
                    return
            except TimeoutError:
                if not self._progress.is_ready:
                    self._progress.waiting()
        await self._stopping.wait()

    async def _keep(self, child: Child, environ: Mapping[str, str]) -> None:
        try:
            await child.keep(environ)
        except GaveUp as failure:
            self._failure = self._failure or failure
            self._stopping.set()

    async def _take_apart(self) -> bool:
        """Stop everything in order; says whether everything ended by itself."""
        seconds = self._options.drain_seconds + MARGIN_SECONDS
        clean = True
        for roles in STOP_ORDER:
            leaving = [child for child in self._children if child.spec.role in roles]
            ended = await asyncio.gather(*(child.stop(seconds) for child in leaving))
            clean = clean and all(ended)
        return clean

    def _hear(self, child: Child, line: Line) -> None:
        if self._stopping.is_set() and not line.is_trouble:
            return
        if line.event == "model ready":
            self._weights = str(line.fields.get("weights", ""))
        if child.spec.role is Role.ROUTER and line.event == "ready":
            self._progress.ready(self._site, self._weights)
        else:
            self._progress.line(child.spec.name, line)

    def _on_signal(self) -> None:
        if not self._stopping.is_set():
            self._progress.note("stopping; again to stop at once")
            self._stopping.set()
            return
        for child in self._children:
            child.kill()


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of every child: ours, less our own settings, with the numeric libraries held to one thread.

    A worker that computes by torch gives its engine more where it is told to.
    """
    kept = {name: value for name, value in environ.items() if not name.startswith(PREFIX) or name == CACHE_VARIABLE}
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return kept | limits | {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
