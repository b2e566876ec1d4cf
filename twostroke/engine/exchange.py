"""The event loop's side of the engine thread: what was handed over, and who waits for what."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from twostroke.engine.core import Delivery, EngineCore
from twostroke.engine.outputs import EngineLoad, StepOutput
from twostroke.engine.stream import Stream
from twostroke.engine.thread import Ask, Command, Do, EngineThread, Results, Stop, WhenIdle
from twostroke.errors import Internal, TwostrokeError, Unavailable

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Exchange:
    """Posts commands to an EngineThread and hands its results to streams and futures.

    Whoever waits here gets an answer: the thread's, or a typed error when the thread has ended.

    Args:
        core: what the thread drives.
        torch_threads: torch's intra-op threads.
    """

    def __init__(self, core: EngineCore, torch_threads: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = EngineThread(core, torch_threads, self._loop, self._publish, self._on_end)
        self._streams: dict[int, Stream] = {}
        self._asked: set[asyncio.Future[Any]] = set()
        self._posted = 0
        self.ended: asyncio.Future[TwostrokeError] = self._loop.create_future()  # with the kind of later calls' errors

    @property
    def open_streams(self) -> int:
        """Streams for which more may come."""
        return sum(not stream.ended for stream in self._streams.values())

    @property
    def load(self) -> EngineLoad:
        """The engine after its last round."""
        return self._thread.load

    @property
    def pending(self) -> bool:
        """Whether commands were posted that `load` does not show yet."""
        return self._thread.carried_out < self._posted

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def close(self, seconds: float) -> None:
        """Stop the thread after its step, waiting at most so long; then everybody who waits is failed."""
        self._post(Stop())
        done, _ = await asyncio.wait((self.ended,), timeout=seconds)
        if not done:
            _log.error("the engine thread is still in a step after %g s and is left behind", seconds)
            self._on_end(None)

    def require_running(self) -> None:
        """Raise what ended the engine, if it has ended."""
        if self.ended.done():
            raise _fresh(self.ended.result())

    def connect(self, number: int, stream: Stream) -> None:
        """Send the deliveries of a sequence to `stream`."""
        self._streams[number] = stream

    def disconnect(self, number: int) -> None:
        """Stop doing so; pages lent with later deliveries are given back."""
        del self._streams[number]

    def do(self, work: Callable[[EngineCore], Sequence[Delivery] | None]) -> None:
        """Have the thread do something; nothing happens once it has ended."""
        if not self.ended.done():
            self._post(Do(work))

    def ask(self, work: Callable[[EngineCore], _T]) -> asyncio.Future[_T]:
        """Have the thread do something, and await its result."""
        reply: asyncio.Future[_T] = self._expected()
        self._post(Ask(work, reply))
        return reply

    async def idle(self) -> None:
        """Return once the thread has carried out every command so far and no sequence is left."""
        while True:
            reply: asyncio.Future[None] = self._expected()
            self._post(WhenIdle(reply))
            posted = self._posted
            await reply
            if self._posted == posted:
                return

    def give_back(self, pages: Sequence[int]) -> None:
        """End the loans of `pages`."""
        if pages:
            self.do(lambda core: core.loans.give_back(pages))

    def _post(self, command: Command) -> None:
        self._posted += 1
        self._thread.post(command)

    def _expected(self) -> asyncio.Future[_T]:
        """A future that the thread will resolve, or else its end."""
        self.require_running()
        reply: asyncio.Future[_T] = self._loop.create_future()
        self._asked.add(reply)
        reply.add_done_callback(self._asked.discard)
        return reply

    def _publish(self, results: Results) -> None:
        """Hand out what one round of the thread brought."""
        if self.ended.done():  # a thread that was left behind; whoever waited has been told
            return
        for delivery in results.deliveries:
            self._deliver(delivery)
        for reply in results.replies:
            if reply.future.done():  # who asked has left
                continue
            if reply.error is not None:
                reply.future.set_exception(reply.error)
            else:
                reply.future.set_result(reply.value)

    def _deliver(self, delivery: Delivery) -> None:
        stream, outcome = self._streams.get(delivery.number), delivery.outcome
        if isinstance(outcome, StepOutput):
            if stream is not None:
                stream.push(outcome, last=delivery.last)
            else:
                self.give_back([block.page for block in outcome.filled])
        elif stream is not None:
            stream.fail(outcome)

    def _on_end(self, cause: BaseException | None) -> None:
        """The thread is gone, or given up: fail all who wait, now and from here on."""
        if self.ended.done():
            return
        reason = Unavailable("the engine is closed") if cause is None else Internal("the engine has stopped")
        self.ended.set_result(reason)
        for stream in self._streams.values():
            if not stream.ended:
                stream.fail(_fresh(reason))
        for reply in tuple(self._asked):
            if not reply.done():
                reply.set_exception(_fresh(reason))


def _fresh(reason: TwostrokeError) -> TwostrokeError:
    """The same error anew: one instance raised by many callers would gather and keep all of their frames."""
    return type(reason)(reason.message)
