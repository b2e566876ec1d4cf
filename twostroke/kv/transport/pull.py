"""One connection to a data plane, and the time that a read may take on it. It blocks: for threads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from twostroke.errors import DeadlineExceeded, TwostrokeError, Unavailable
from twostroke.kv.transport import frames
from twostroke.kv.transport.frames import Code, Status, Trailer
from twostroke.kv.transport.peer import Seal
from twostroke.kv.transport.sockets import TimedSocket

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """What a read may still take: each operation its limit, and all of them until the deadline."""

    operation_seconds: float
    end: float | None  # on time.monotonic

    @classmethod
    def until(cls, deadline: float | None, operation_seconds: float) -> TimeLeft:
        """The time until a deadline on the running loop's clock."""
        if deadline is None:
            return cls(operation_seconds, None)
        return cls(operation_seconds, time.monotonic() + deadline - asyncio.get_running_loop().time())

    @property
    def is_up(self) -> bool:
        """Whether the deadline has passed."""
        return self.end is not None and time.monotonic() >= self.end

    def seconds(self) -> float:
        """Seconds for the next operation. Raises DeadlineExceeded when none is left."""
        if self.end is None:
            return self.operation_seconds
        left = self.end - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the request's time is up")
        return min(left, self.operation_seconds)

    def blame(self, error: Exception, what: str) -> TwostrokeError:
        """What an operation's failure means: the request's own time was too short, or the peer is in trouble."""
        if self.is_up:
            return DeadlineExceeded("the request's time is up")
        return Unavailable(f"{what}: {error or type(error).__name__}")


class Stale(Exception):
    """The source had closed the connection before the request came: another connection may serve it."""


class Connection:
    """A connected socket, and what is known of the conversation on it.

    Attributes:
        in_step: both sides are between two requests; only then may the connection be used again.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.in_step = False
        self._socket = TimedSocket(connected)
        self._greeted = False
        self._unsent = memoryview(b"")
        self._status = bytearray(frames.STATUS_BYTES)
        self._trailer = bytearray(frames.TRAILER_BYTES)

    def begin(self, request: bytes) -> None:
        """Have the source start on a request while `pull` waits for its thread. Never blocks: for an event loop."""
        self.in_step = False
        self._unsent = memoryview(request)
        if self._greeted:
            self._unsent = self._unsent[self._socket.send_now(request) :]

    def pull(self, into: Sequence[memoryview], whole: list[Seal], left: TimeLeft) -> None:
        """Ask what was begun, and receive blocks into memory, each of a block's bytes.

        Appends to `whole` for each block that came whole, also when it raises after that.

        Raises: TwostrokeError; Stale.
        """
        try:
            self._ask(into, left)
            self.in_step = self._receive(into, whole, left)
        except OSError as error:
            raise left.blame(error, "the peer's data plane failed") from error

    def shut(self) -> None:
        """End the conversation, from any thread: what waits for the peer stops waiting."""
        self._socket.shut()

    def close(self) -> None:
        """Close the socket; no other thread uses it."""
        self._socket.close()

    def _ask(self, into: Sequence[memoryview], left: TimeLeft) -> None:
        """Send the rest of the request; returns when the first block follows."""
        used, self._greeted = self._greeted, True
        if not used:
            self._hear(left)  # before anything is sent: a refusal that crossed a request could get lost
        try:
            with contextlib.suppress(ConnectionError):  # one that refuses need not read on; it has said why
                if self._unsent:
                    self._socket.send([self._unsent], left.seconds())
            status = self._hear(left)
        except ConnectionError as error:
            if used:
                raise Stale from error
            raise
        if any(len(each) != status.block_bytes for each in into):
            raise Unavailable(f"the peer's blocks have {status.block_bytes} bytes")

    def _hear(self, left: TimeLeft) -> Status:
        self._socket.receive([self._status], left.seconds())
        status = Status.unpack(self._status)
        if status.code is not Code.OK:
            raise frames.refusal(status.code)
        return status

    def _receive(self, into: Sequence[memoryview], whole: list[Seal], left: TimeLeft) -> bool:
        """Receive blocks up to the first miss; answers whether both sides are between requests then."""
        for memory in into:
            self._socket.receive([memory, self._trailer], left.seconds())
            trailer = Trailer.unpack(self._trailer)
            if not trailer.whole:
                return not trailer.follows
            if trailer.checksum != xxhash.xxh3_64_intdigest(memory):  # meanwhile the kernel receives the next block
                log.warning("a block came with a wrong checksum")
                return False
            whole.append(Seal(trailer.tokens, trailer.checksum))
            if not trailer.follows:
                return True
        return False  # more follows than was asked for
