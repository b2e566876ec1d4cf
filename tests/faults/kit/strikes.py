"""Blows at a named point: arming them in a running service, and knowing when they were dealt."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from tests.support.faults import Armed, armed
from twostroke.rpc.channel import connect
from twostroke.v1 import faults_pb2

DELAY_SECONDS = 0.5
CALLED, ANSWERED = faults_pb2.MOMENT_CALLED, faults_pb2.MOMENT_ANSWERED
Server = TypeVar("Server")


class Blow(enum.Enum):
    """What happens at a point."""

    KILL_SERVER = "kill server"  # kill -9 while it stands still there
    KILL_CALLER = "kill caller"
    STOP_SERVER = "stop server"  # SIGSTOP, and SIGCONT once the request has its answer
    FAIL = "fail"  # the call ends with UNAVAILABLE, the operation with an input/output error
    FULL = "full"  # the disk has no room
    LOSE = "lose"  # the message never arrives, until the caller gives up waiting; the disk hangs
    DELAY = "delay"  # by half a second
    CORRUPT = "corrupt"  # one bit of the bytes
    CANCEL = "cancel"  # the user leaves at that moment


_FAULTS = {
    Blow.FAIL: faults_pb2.FAULT_FAIL,
    Blow.FULL: faults_pb2.FAULT_FULL,
    Blow.DELAY: faults_pb2.FAULT_DELAY,
    Blow.CORRUPT: faults_pb2.FAULT_CORRUPT,
}


class PassedByError(Exception):
    """The request had its answer without coming to this point: a prefetch may come too late to be sent."""


class Aim(Protocol):
    """Where to strike, as FaultService takes it, and how."""

    @property
    def method(self) -> str:
        """A call, or an operation."""

    @property
    def moment(self) -> faults_pb2.Moment.ValueType:
        """Before or after."""

    @property
    def blow(self) -> Blow:
        """What happens."""

    @property
    def field(self) -> str:
        """What a message holds, where those of one call differ."""

    @property
    def skip(self) -> int:
        """How many pass."""


@asynccontextmanager
async def aimed(address: str, aim: Aim) -> AsyncIterator[Armed]:
    """A blow that waits for its moment in the service at `address`; leaving the block lets go of what is held there."""
    channel = connect(address)
    fault = _FAULTS.get(aim.blow, faults_pb2.FAULT_HOLD)
    try:
        async with armed(
            channel, aim.method, aim.moment, fault, field=aim.field, skip=aim.skip, delay=DELAY_SECONDS
        ) as waiting:
            yield waiting
    finally:
        await channel.close()


async def first_struck(faults: Mapping[Server, Armed], asked: asyncio.Task[object], *, behind: bool = False) -> Server:
    """The service that was struck first: `behind` says that it may be after the answer has ended.

    Raises: PassedByError; what the request fails with.
    """
    waits = {asyncio.create_task(fault.struck()): service for service, fault in faults.items()}
    until = {*waits} if behind else {*waits, asked}
    try:
        await asyncio.wait(until, return_when=asyncio.FIRST_COMPLETED)
        struck = [service for wait, service in waits.items() if wait.done() and not wait.exception()]
        if not struck:
            await asked  # its own failure, if there is one, says more
            raise PassedByError
        return struck[0]
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)


async def ended(asked: asyncio.Task[object]) -> None:
    """Leave a request."""
    asked.cancel()
    await asyncio.wait({asked})
