"""Faults armed in a running process: where a call stands still, a test may strike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from twostroke.v1 import faults_pb2, faults_pb2_grpc
from twostroke.wire import duration_pb

STRIKE_SECONDS = 20.0


class Armed:
    """A fault that waits for its call."""

    def __init__(self, call: grpc.aio.UnaryStreamCall[faults_pb2.ArmRequest, faults_pb2.ArmResponse]) -> None:
        self._call = call

    async def struck(self) -> int:
        """The number of the next strike, once it has happened."""
        async with asyncio.timeout(STRIKE_SECONDS):
            response = await self._call.read()
        assert isinstance(response, faults_pb2.ArmResponse), "the process ended before the fault struck"
        return response.strike

    def disarm(self) -> None:
        """Strike no more, and let held calls go on."""
        self._call.cancel()


@asynccontextmanager
async def armed(
    channel: grpc.aio.Channel,
    method: str,
    moment: faults_pb2.Moment.ValueType,
    fault: faults_pb2.Fault.ValueType,
    *,
    field: str = "",
    skip: int = 0,
    strikes: int = 1,
    delay: float = 0.0,
) -> AsyncIterator[Armed]:
    """Keep a fault armed inside the block; leaving it lets held calls go on."""
    request = faults_pb2.ArmRequest(
        method=method,
        moment=moment,
        fault=fault,
        field=field,
        skip=skip,
        strikes=strikes,
        delay=duration_pb(delay),
    )
    call = faults_pb2_grpc.FaultServiceStub(channel).Arm(request, wait_for_ready=True)
    try:
        fault_ = Armed(call)
        assert await fault_.struck() == 0  # it is armed
        yield fault_
    finally:
        call.cancel()
