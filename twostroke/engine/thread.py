"""The engine's one thread: commands in by one queue drained between steps, results out by one call a step."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from twostroke.engine.core import Delivery, EngineCore

# After each operator the engine needs the interpreter; a busy loop may keep it so long. Python's default is 5 ms.
SWITCH_SECONDS = 0.0005

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Do:
    """Work without an answer; what it delivers goes out with the step."""

    work: Callable[[EngineCore], Sequence[Delivery] | None]


@dataclass(frozen=True, slots=True)
class Ask:
    """Work whose result somebody awaits."""

    work: Callable[[EngineCore], Any]
    reply: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class WhenIdle:
    """Answered as soon as no sequence is left."""

    reply: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread; sequences are left as they are."""


Command = Do | Ask | WhenIdle | Stop


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to an Ask: a value or an exception."""

    future: asyncio.Future[Any]
    value: Any = None
    error: Exception | None = None


@dataclass(slots=True)
class Results:
    """Everything that one round of the thread has to say."""

    deliveries: list[Delivery] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)


class EngineThread:
    """Drives an EngineCore until told to stop.

    Args:
        core: used by this thread alone once it has started.
        torch_threads: torch's intra-op threads for the passes.
        loop: where the next two are called.
        publish: gets the results of a round.
        ended: called once, last, with what ended the thread, or None when it was told to stop.
    """

    def __init__(
        self,
        core: EngineCore,
        torch_threads: int,
        loop: asyncio.AbstractEventLoop,
        publish: Callable[[Results], None],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        self._core = core
        self._torch_threads = torch_threads
        self._loop = loop
        self._publish = publish
        self._ended = ended
        # Unbounded by type, bounded by use: a submit is refused beyond the engine's limits, every other command belongs
        # to one submit, one loan, or one awaiting caller.
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._idlers: list[asyncio.Future[None]] = []
        self._stopping = False
        self.load = core.load()  # replaced whole after each round, so any thread may read it
        self.carried_out = 0  # commands whose effect `load` shows
        # A daemon, so that a pass that hangs cannot keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin; call once."""
        self._thread.start()

    def post(self, command: Command) -> None:
        """Hand over a command; it is carried out before the next step."""
        self._commands.put(command)

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            torch.set_num_threads(self._torch_threads)
            sys.setswitchinterval(min(SWITCH_SECONDS, sys.getswitchinterval()))
            self._serve()
            self._core.check_integrity()
        except BaseException as error:  # noqa: BLE001 - reported to the loop, which fails every waiter
            _log.exception("the engine thread ends")
            cause = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._ended, cause)

    def _serve(self) -> None:
        blocked = True
        while not self._stopping:
            results = Results()
            commands = self._drain(wait=blocked)
            for command in commands:
                self._carry_out(command, results)
            if not self._stopping:
                blocked = not self._step(results)
            self.load = self._core.load()
            self.carried_out += len(commands)
            if results.deliveries or results.replies:
                self._loop.call_soon_threadsafe(self._publish, results)

    def _step(self, results: Results) -> bool:
        """Run a step; False when none can run before another command comes."""
        was_busy = self._core.busy
        deliveries = self._core.step()
        results.deliveries += deliveries or ()
        if not self._core.busy:
            self._rest(results, check=was_busy)
        return deliveries is not None

    def _drain(self, *, wait: bool) -> list[Command]:
        """All commands there are; with `wait`, at least one."""
        commands = [self._commands.get()] if wait else []
        with contextlib.suppress(queue.Empty):
            while True:
                commands.append(self._commands.get_nowait())
        return commands

    def _carry_out(self, command: Command, results: Results) -> None:
        match command:
            case Do(work):
                try:
                    results.deliveries += work(self._core) or ()
                except Exception:  # noqa: BLE001 - a caller's mistake must not end the others' engine
                    _log.exception("a command failed")
            case Ask(work, reply):
                try:
                    results.replies.append(Reply(reply, work(self._core)))
                except Exception as error:  # noqa: BLE001 - raised where it is awaited
                    results.replies.append(Reply(reply, error=error))
            case WhenIdle(reply):
                self._idlers.append(reply)
            case Stop():
                self._stopping = True

    def _rest(self, results: Results, *, check: bool) -> None:
        """Nothing is left to run: answer who waits for that, and compare the accounts."""
        if check:
            self._core.check_idle()
        results.replies += [Reply(each) for each in self._idlers]
        self._idlers.clear()
