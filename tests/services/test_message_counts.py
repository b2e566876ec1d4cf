"""What a decode worker streams is counted: a router takes no message twice, none too many, and misses none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from services.router.member import Member
from tests.support.stores import KV_FORMAT
from twostroke.cluster import ModelInfo, Role, WorkerInfo
from twostroke.errors import WorkerLost
from twostroke.handoff import DecodeOrder
from twostroke.rpc.server import ServerSettings, serving
from twostroke.telemetry import Span
from twostroke.types import RequestContext, SamplingParams, StopConditions
from twostroke.v1 import common_pb2, decode_pb2, decode_pb2_grpc

UNKNOWN_FIELD = bytes([0xFA, 0x7F, 0x01, 0x78])  # number 2047, one byte: of a version to come
INFO = WorkerInfo(
    incarnation="one",
    role=Role.DECODE,
    model=ModelInfo(
        id="tiny",
        architecture="llama",
        context_tokens=256,
        vocab_size=256,
        end_token_ids=frozenset(),
        weight_mode="f32",
        tokenizer_digest=bytes(16),
        fingerprint="f32-0",
    ),
    kv_format=KV_FORMAT,
    device="cpu",
    pages=8,
    max_running=1,
    max_open=1,
)
ORDER = DecodeOrder(
    context=RequestContext(request_id="counted"),
    prompt=(1, 2, 3),
    emitted=(4,),
    sampling=SamplingParams(temperature=0.0),
    stops=StopConditions(max_tokens=9),
    choice=0,
    ticket=None,
)


def message(sequence: int, tokens: Sequence[int], total: int) -> decode_pb2.DecodeResponse:
    told = [common_pb2.Token(id=each) for each in tokens]
    return decode_pb2.DecodeResponse(sequence=sequence, tokens=told, total_tokens=total)


class Telling(decode_pb2_grpc.DecodeServiceServicer):
    """A worker of some other make."""

    full_name = "twostroke.v1.DecodeService"

    def __init__(self, messages: Sequence[decode_pb2.DecodeResponse]) -> None:
        self._messages = messages

    def register(self, server: Any) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

    async def Decode(self, request: Any, context: Any) -> AsyncIterator[decode_pb2.DecodeResponse]:
        for each in self._messages:
            yield each


async def heard(messages: Sequence[decode_pb2.DecodeResponse], into: list[int]) -> None:
    """What a router takes of these messages, up to the first that it does not."""
    async with serving(ServerSettings(drain_seconds=1.0), Telling(messages)) as server:  # type: ignore[abstract]
        member = Member(server.address, Role.DECODE, 10.0)
        member.info = INFO
        try:
            deadline = asyncio.get_running_loop().time() + 30
            async with aclosing(member.decode(ORDER, deadline, Span(None))) as news:
                async for written in news:
                    into += [token.id for token in written.tokens]
        finally:
            await member.close()


@pytest.mark.parametrize(
    ("messages", "taken"),
    [
        ([message(1, [5], 2), message(1, [5], 2)], [5]),
        ([message(1, [5], 2), message(3, [7], 4)], [5]),
        ([message(1, [5], 2), message(2, [5, 6], 3)], [5]),
        ([message(1, [5], 2), message(2, [], 3)], [5]),
        ([message(1, [4, 5], 2)], []),
        ([message(0, [5], 2)], []),
    ],
    ids=[
        "a message twice",
        "a message missing",
        "running totals in place of what is new",
        "tokens missing",
        "what was known already",
        "a count from nought",
    ],
)
async def test_a_stream_that_does_not_add_up_is_a_lost_worker(
    messages: list[decode_pb2.DecodeResponse], taken: list[int]
) -> None:
    told: list[int] = []
    with pytest.raises(WorkerLost, match="is not the one that was due"):
        await heard(messages, told)
    assert told == taken


async def test_fields_of_a_later_version_are_passed_over() -> None:
    later = message(2, [6, 7], 4)
    later.MergeFromString(UNKNOWN_FIELD)
    assert later.SerializeToString().endswith(UNKNOWN_FIELD)
    told: list[int] = []
    await heard([message(1, [5], 2), later], told)
    assert told == [5, 6, 7]
