"""What the user of `twostroke up` reads: a line for each process that serves, any trouble, and one that says ready."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TextIO

from twostroke.access.bearer import API_KEY_VARIABLE
from twostroke.launcher.journal import Line
from twostroke.launcher.plan import Site

TROUBLES_SHOWN = 20  # of one child in TROUBLES_SECONDS; the rest is in its log file
TROUBLES_SECONDS = 10.0
QUESTION = '[{"role": "user", "content": "What is the capital of France?"}]'
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # where to go when a door is open on every interface


class Progress:
    """Writes progress to `notes` and the ready line to `out`.

    Args:
        command: how the user calls `twostroke`.
        clock: seconds that never run backwards.
    """

    def __init__(
        self, out: TextIO, notes: TextIO, *, command: str = "twostroke", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out = out
        self._command = command
        self._notes = notes
        self._clock = clock
        self._started = clock()
        self._shown: dict[str, tuple[float, int]] = {}  # child -> start of its window, troubles shown in it
        self._awaited: list[str] = []  # children that do not serve yet
        self._hindrance = ""  # why the router is not ready, in its words
        self.is_ready = False

    def note(self, text: str) -> None:
        """One line of progress."""
        _write(self._notes, f"twostroke: {text}\n")

    def starting(self, children: Iterable[str], site: Site, logs: Path) -> None:
        """Say what is being started."""
        self._awaited = list(children)
        self.note(f"starting {len(self._awaited)} processes for {site.model_name}; logs in {logs}")

    def line(self, child: str, line: Line) -> None:
        """Pass on what matters of what a child says; all of it is in the child's log."""
        if line.is_trouble:
            if self._may_show(child):
                self.note(f"{child}: {line.level}: {line}")
        elif line.event == "serving":
            self._awaited = [name for name in self._awaited if name != child]
            self.note(f"{child} serves at {line.fields.get('address')} ({self._seconds():.1f} s)")
        elif line.event == "not ready":
            self._hindrance = str(line.fields.get("reason", ""))

    def waiting(self) -> None:
        """Say what a long start is waiting for."""
        awaited = ", ".join(self._awaited) or f"the router: {self._hindrance}"
        self.note(f"waiting for {awaited} ({self._seconds():.0f} s)")

    def ready(self, site: Site, weights: str) -> None:
        """Say where the cluster is, and how to ask it something; later on, only that it is back."""
        if self.is_ready:
            self.note("ready again")
            return
        self.is_ready = True
        about = f"{site.model_name}, weights {weights}"
        workers = f"{len(site.prefill)} prefill, {len(site.decode)} decode"
        http, grpc = reachable(site.http_listen), reachable(site.router.reach)
        header = f' -H "authorization: Bearer ${API_KEY_VARIABLE}"' if site.api_keys else ""
        key = f'os.environ["{API_KEY_VARIABLE}"]' if site.api_keys else '"none"'
        _write(
            self._out,
            f"ready http://{http} ({about}, {workers}, gRPC {grpc}, {self._seconds():.1f} s)\n"
            f"  curl http://{http}/v1/chat/completions -H 'content-type: application/json'{header} \\\n"
            f'    -d \'{{"temperature": 0, "messages": {QUESTION}}}\'\n'
            f'  client = openai.OpenAI(base_url="http://{http}/v1", api_key={key})\n'
            f'  client.chat.completions.create(model="default", temperature=0, messages={QUESTION})\n'
            f"  {self._command} chat --address {grpc}\n",
        )

    def _seconds(self) -> float:
        return self._clock() - self._started

    def _may_show(self, child: str) -> bool:
        start, shown = self._shown.get(child, (self._clock(), 0))
        if self._clock() - start >= TROUBLES_SECONDS:
            start, shown = self._clock(), 0
        self._shown[child] = (start, shown + 1)
        if shown == TROUBLES_SHOWN:
            self.note(f"{child}: more warnings are in its log")
        return shown < TROUBLES_SHOWN


def _write(stream: TextIO, text: str) -> None:
    with contextlib.suppress(OSError):  # a closed terminal or pipe must not end the cluster
        stream.write(text)
        stream.flush()


def reachable(address: str) -> str:
    """The address to give to a client of a door that listens at `address`."""
    host, _, port = address.rpartition(":")
    return f"{_ANYWHERE.get(host, host)}:{port}"
