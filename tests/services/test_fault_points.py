"""FaultService: calls that stand still, fail, wait or lie where a test says, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from services.kvstore.service import KvStoreService
from services.kvstore.strikes import DISK_OPERATIONS
from tests.support.faults import armed
from tests.support.stores import KV_FORMAT, keys, serving_store
from twostroke import wire
from twostroke.errors import InvalidRequest, NotFound, Overloaded, Unavailable
from twostroke.rpc.channel import connect
from twostroke.rpc.faultboard import MAX_ARMED, FaultBoard, flip_a_bit
from twostroke.rpc.faults import MAX_DELAY_SECONDS, MAX_STRIKES
from twostroke.rpc.server import ServerSettings, serving
from twostroke.rpc.status import domain_errors
from twostroke.v1 import common_pb2, faults_pb2, faults_pb2_grpc, kvstore_pb2
from twostroke.v1.kvstore_pb2_grpc import KvStoreServiceStub
from twostroke.wire import duration_pb

SETTINGS = ServerSettings(fault_points=True, drain_seconds=1.0)
LOOKUP = "KvStoreService/Lookup"


@asynccontextmanager
async def struck(tmp_path: Path) -> AsyncIterator[tuple[grpc.aio.Channel, KvStoreServiceStub, str]]:
    async with (
        serving_store(tmp_path) as store,
        serving(SETTINGS, KvStoreService(store.node), board=FaultBoard(DISK_OPERATIONS)) as server,
    ):
        channel = connect(server.address)
        stub = KvStoreServiceStub(channel)
        attached = await stub.Attach(kvstore_pb2.AttachRequest(format=wire.kv_format_pb(KV_FORMAT)), timeout=5)
        yield channel, stub, attached.incarnation
        await channel.close()


def lookup(stub: KvStoreServiceStub, incarnation: str) -> grpc.aio.UnaryUnaryCall[object, kvstore_pb2.LookupResponse]:
    return stub.Lookup(kvstore_pb2.LookupRequest(incarnation=incarnation, keys=keys(1)), timeout=10)


async def test_a_held_call_goes_on_when_the_fault_is_disarmed(tmp_path: Path) -> None:
    async with struck(tmp_path) as (channel, stub, incarnation):
        for moment in (faults_pb2.MOMENT_CALLED, faults_pb2.MOMENT_ANSWERED):
            async with armed(channel, LOOKUP, moment, faults_pb2.FAULT_HOLD) as fault:
                call = lookup(stub, incarnation)
                assert await fault.struck() == 1
                assert not call.done()
                assert (await lookup(stub, incarnation)).held == 0  # one strike: the next call passes
            assert (await call).held == 0


async def test_a_fault_fails_as_many_calls_as_it_was_told_after_those_it_skips(tmp_path: Path) -> None:
    called, fail = faults_pb2.MOMENT_CALLED, faults_pb2.FAULT_FAIL
    async with (
        struck(tmp_path) as (channel, stub, incarnation),
        armed(channel, LOOKUP, called, fail, skip=1, strikes=2),
    ):
        assert (await lookup(stub, incarnation)).held == 0
        for _ in range(2):
            with pytest.raises(Unavailable, match="on purpose"), domain_errors():
                await lookup(stub, incarnation)
        assert (await lookup(stub, incarnation)).held == 0


async def test_a_fault_strikes_only_messages_that_have_its_field(tmp_path: Path) -> None:
    called, fail = faults_pb2.MOMENT_CALLED, faults_pb2.FAULT_FAIL
    async with (
        struck(tmp_path) as (channel, stub, incarnation),
        armed(channel, LOOKUP, called, fail, field="keys"),
    ):
        assert (await stub.Lookup(kvstore_pb2.LookupRequest(incarnation=incarnation), timeout=5)).held == 0
        with pytest.raises(grpc.aio.AioRpcError):
            await lookup(stub, incarnation)


async def test_a_corrupted_message_differs_in_one_bit() -> None:
    ref = common_pb2.BlockRef(key=bytes(16), generation=3, tokens=4)
    ticket = common_pb2.Ticket(blocks=[ref, ref])
    assert flip_a_bit(ticket)
    assert ticket.blocks[0].key == b"\x01" + bytes(15)
    assert ticket.blocks[1] == ref
    assert not flip_a_bit(common_pb2.Usage(prompt_tokens=3))


async def test_bad_requests_are_refused_by_the_name_of_the_field(tmp_path: Path) -> None:
    called, hold = faults_pb2.MOMENT_CALLED, faults_pb2.FAULT_HOLD
    bad = {
        "method": faults_pb2.ArmRequest(method="KvStoreService/Nothing", moment=called, fault=hold),
        "moment": faults_pb2.ArmRequest(method=LOOKUP, fault=hold),
        "fault": faults_pb2.ArmRequest(method=LOOKUP, moment=called),
        "delay": faults_pb2.ArmRequest(
            method=LOOKUP, moment=called, fault=hold, delay=duration_pb(MAX_DELAY_SECONDS + 1)
        ),
        "fault of a call": faults_pb2.ArmRequest(method=LOOKUP, moment=called, fault=faults_pb2.FAULT_FULL),
        "field": faults_pb2.ArmRequest(method="disk.blocks.read", moment=called, fault=hold, field="keys"),
        "strikes": faults_pb2.ArmRequest(method=LOOKUP, moment=called, fault=hold, strikes=MAX_STRIKES + 1),
    }
    async with struck(tmp_path) as (channel, _, _):
        stub = faults_pb2_grpc.FaultServiceStub(channel)
        for field, request in bad.items():
            with pytest.raises((InvalidRequest, NotFound)) as refusal, domain_errors():
                await stub.Arm(request, timeout=5).read()
            assert refusal.value.field == field.partition(" ")[0]


def test_no_more_faults_are_armed_than_the_board_holds() -> None:
    board, request = FaultBoard(), faults_pb2.ArmRequest(method=LOOKUP)
    held = [board.arm(request) for _ in range(MAX_ARMED)]
    for each in held:
        each.__enter__()
    with pytest.raises(Overloaded), board.arm(request):
        pass
    for each in held:
        each.__exit__(None, None, None)
    with board.arm(request):
        pass


async def test_without_the_setting_nobody_can_strike(tmp_path: Path) -> None:
    async with serving_store(tmp_path) as store:
        channel = connect(store.address)
        stub = faults_pb2_grpc.FaultServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Arm(faults_pb2.ArmRequest(method=LOOKUP), timeout=5).read()
        assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await channel.close()
