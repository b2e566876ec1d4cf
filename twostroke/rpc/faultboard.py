"""The faults that are armed in a process, and what they do to whatever comes to their point."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from google.protobuf.message import Message

from twostroke.errors import Overloaded, Unavailable
from twostroke.v1 import faults_pb2 as pb
from twostroke.wire import seconds

MAX_ARMED = 64
OPERATION_SECONDS = 120.0  # an operation is held so long at most: longer than any delay


class Armed:
    """One fault, and what it has done."""

    def __init__(self, request: pb.ArmRequest) -> None:
        self.request = request
        self.disarmed = asyncio.Event()
        self.struck: asyncio.Queue[int] = asyncio.Queue()  # bounded by `strikes`
        self._skip = request.skip
        self._strikes = 0

    def takes(self, method: str, moment: pb.Moment.ValueType, handled: Message | memoryview) -> bool:
        """Whether this is one to strike; counts it."""
        request = self.request
        if (request.method, request.moment) != (method, moment) or self._strikes >= max(1, request.strikes):
            return False
        if request.field and not _has(handled, request.field):
            return False
        if self._skip:
            self._skip -= 1
            return False
        self._strikes += 1
        self.struck.put_nowait(self._strikes)
        return True

    async def strike(self, handled: Message | memoryview) -> None:
        """Do it. Raises Unavailable in a call, OSError in an operation, where that is the fault."""
        is_call = isinstance(handled, Message)
        match self.request.fault:
            case pb.FAULT_HOLD:
                await self.disarmed.wait()
            case pb.FAULT_DELAY:
                await asyncio.sleep(seconds(self.request.delay))
            case pb.FAULT_FAIL if is_call:
                raise Unavailable("a fault on purpose")
            case pb.FAULT_FAIL | pb.FAULT_FULL as fault:
                number = errno.EIO if fault == pb.FAULT_FAIL else errno.ENOSPC
                raise OSError(number, f"{os.strerror(number)}, on purpose")
            case _:
                flip_a_bit(handled)


class FaultBoard:
    """The faults that are armed in this process. It belongs to one event loop.

    Args:
        operations: names of the points that are no calls.
    """

    def __init__(self, operations: Collection[str] = ()) -> None:
        self.operations = frozenset(operations)
        self._armed: list[Armed] = []

    @contextmanager
    def arm(self, request: pb.ArmRequest) -> Iterator[Armed]:
        """Keep a fault armed inside the block. Raises Overloaded."""
        if len(self._armed) >= MAX_ARMED:
            raise Overloaded(f"{MAX_ARMED} faults are armed")
        armed = Armed(request)
        self._armed.append(armed)
        try:
            yield armed
        finally:
            self._armed.remove(armed)
            armed.disarmed.set()

    async def reach(self, name: str, moment: pb.Moment.ValueType, handled: Message | memoryview) -> None:
        """A call or an operation is at this point with what it has in hand; strike what is armed for it.

        Raises: Unavailable, OSError; see `Armed.strike`.
        """
        for armed in tuple(self._armed):
            if armed.takes(name, moment, handled):
                await armed.strike(handled)

    def reach_from_thread(
        self, loop: asyncio.AbstractEventLoop, name: str, moment: pb.Moment.ValueType, handled: memoryview
    ) -> None:
        """The same for an operation in a thread beside the board's loop, which waits there. Raises OSError."""
        if self._armed:
            reaching = asyncio.run_coroutine_threadsafe(self.reach(name, moment, handled), loop)
            try:
                reaching.result(OPERATION_SECONDS)
            finally:
                reaching.cancel()


def flip_a_bit(handled: Message | memoryview) -> bool:
    """Flip one bit of the first bytes, in a message those of the first field that is set, its own or a part's.

    Says whether there are any.
    """
    if isinstance(handled, memoryview):
        if handled.nbytes:
            handled[0] ^= 1
        return handled.nbytes > 0
    for field, value in handled.ListFields():
        parts = list(value) if field.is_repeated else [value]
        if field.type == field.TYPE_BYTES and parts[0]:
            flipped = bytes([parts[0][0] ^ 1]) + parts[0][1:]
            if field.is_repeated:
                value[0] = flipped
            else:
                setattr(handled, field.name, flipped)
            return True
        if field.type == field.TYPE_MESSAGE and any(isinstance(part, Message) and flip_a_bit(part) for part in parts):
            return True
    return False


def _has(handled: Message | memoryview, wanted: str) -> bool:
    return isinstance(handled, Message) and any(field.name == wanted for field, _ in handled.ListFields())
