"""What a malformed message is told: the field that is wrong, in the words of whoever sent it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from google.protobuf.message import Message

from tests.support.stores import KV_FORMAT
from twostroke import limits, wire
from twostroke.access.caller import Caller
from twostroke.errors import FormatMismatch, Internal, InvalidRequest
from twostroke.handoff import DecodeOrder, PrefillOrder, Ticket
from twostroke.kv import messages
from twostroke.kv.refs import BlockRef, BlockSlot, Lease, Reservation
from twostroke.types import (
    CachePolicy,
    Delta,
    GenerateRequest,
    Priority,
    RequestContext,
    SamplingParams,
    StopConditions,
    Token,
)
from twostroke.v1 import common_pb2, decode_pb2, kvstore_pb2, prefill_pb2, router_pb2, worker_pb2
from twostroke.wire import handoff, worker

CONTEXT = RequestContext(request_id="r")
STOPS = StopConditions(max_tokens=4)
LEASE = Lease(id="l", seconds=30.0, incarnation="n")
ADDRESSED: dict[str, Any] = {"incarnation": "w", "format_digest": bytes(16)}
LONG = "x" * (limits.MAX_NAME_CHARACTERS + 1)
PREFILL = handoff.prefill_order_pb(
    PrefillOrder(context=CONTEXT, prompt=(1,), sampling=SamplingParams(), stops=STOPS, lease_id="0" * 32), **ADDRESSED
)
DECODE = handoff.decode_order_pb(
    DecodeOrder(
        context=CONTEXT, prompt=(1,), emitted=(), sampling=SamplingParams(), stops=STOPS, choice=0, ticket=None
    ),
    **ADDRESSED,
)
GENERATE = wire.generate_request_pb(
    GenerateRequest(context=CONTEXT, prompt="hello", sampling=SamplingParams(), max_tokens=4),
    output=router_pb2.OUTPUT_TEXT,
)

asked = partial(wire.generate_request, caller=Caller())


def refused(read: Callable[[Any], object], message: Message, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        read(message)
    assert error.value.field == field


def changed(message: Any, **fields: Any) -> Any:
    """A copy with fields set; a sub-message in a path such as `stops__max_tokens`."""
    copy = type(message)()
    copy.CopyFrom(message)
    for path, value in fields.items():
        *parents, name = path.split("__")
        owner = copy
        for parent in parents:
            owner = getattr(owner, parent)
        if isinstance(value, list | tuple | dict):
            owner.ClearField(name)
            owner.MergeFrom(type(owner)(**{name: value}))
        elif value is None:
            owner.ClearField(name)
        else:
            setattr(owner, name, value)
    return copy


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"context__request_id": ""}, "context.request_id"),
        ({"context__request_id": LONG}, "context.request_id"),
        ({"context__attempt": 0}, "context.attempt"),
        ({"sampling__seed": None}, "sampling.seed"),
        ({"stops__max_tokens": None}, "stops.max_tokens"),
        ({"stops__max_tokens": limits.MAX_TOKENS + 1}, "stops.max_tokens"),
        ({"stops__stop_token_ids": range(limits.MAX_STOP_TOKEN_IDS + 1)}, "stop_token_ids"),
        ({"prompt": []}, "prompt"),
    ],
)
def test_an_order_names_the_field_that_is_wrong(fields: dict[str, Any], field: str) -> None:
    told = {path: list(value) if isinstance(value, range) else value for path, value in fields.items()}
    refused(handoff.prefill_order, changed(PREFILL, **told), field)
    refused(handoff.decode_order, changed(DECODE, **told), field)


def test_choices_are_bounded() -> None:
    for choices in (0, limits.MAX_CHOICES + 1):
        refused(handoff.prefill_order, changed(PREFILL, choices=choices), "choices")
    refused(handoff.decode_order, changed(DECODE, choice=limits.MAX_CHOICES), "choice")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_k": limits.MAX_TOKENS + 1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"frequency_penalty": math.inf}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logprobs": limits.MAX_LOGPROBS + 1}, "top_logprobs"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(limits.MAX_LOGIT_BIAS + 1), 1.0)}, "logit_bias"),
    ],
)
def test_every_sampling_parameter_has_its_range_on_every_door(fields: dict[str, Any], field: str) -> None:
    told = {f"sampling__{name}": value for name, value in fields.items()}
    refused(asked, changed(GENERATE, **told), field)
    refused(handoff.prefill_order, changed(PREFILL, **told), field)
    refused(handoff.decode_order, changed(DECODE, **told), field)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": None}, "prompt"),
        ({"text": ""}, "prompt"),
        ({"token_ids": router_pb2.TokenIds()}, "prompt"),
        ({"messages": router_pb2.Conversation()}, "messages"),
        ({"messages": router_pb2.Conversation(messages=[router_pb2.Message(role="wizard", content="a")])}, "messages"),
        ({"messages": router_pb2.Conversation(messages=[router_pb2.Message(role="user", name=LONG)])}, "messages"),
        ({"request_id": LONG}, "request_id"),
        ({"session": LONG}, "session"),
        ({"cache_salt": LONG}, "cache_salt"),
        ({"model": LONG}, "model"),
        ({"n": 0}, "n"),
        ({"n": limits.MAX_CHOICES + 1}, "n"),
        ({"stops__max_tokens": 0}, "max_tokens"),
        ({"stops__min_tokens": 5}, "min_tokens"),
        ({"stops__stop_token_ids": list(range(limits.MAX_STOP_TOKEN_IDS + 1))}, "stop_token_ids"),
        ({"stop_strings": [""]}, "stop"),
        ({"stop_strings": ["x" * (limits.MAX_STOP_STRING_CHARACTERS + 1)]}, "stop"),
        ({"stop_strings": ["a"] * (limits.MAX_STOP_STRINGS + 1)}, "stop"),
    ],
)
def test_a_callers_request_names_the_field_that_is_wrong(fields: dict[str, Any], field: str) -> None:
    message = GENERATE
    for name, value in fields.items():
        if isinstance(value, Message):
            message = changed(message)
            getattr(message, name).CopyFrom(value)
            getattr(message, name).SetInParent()
        else:
            message = changed(message, **{name: value})
    refused(asked, message, field)


def test_what_a_caller_leaves_out_is_drawn_or_stands_for_its_default() -> None:
    message = router_pb2.GenerateRequest(text="hello")
    first, second = asked(message), asked(message)
    assert first.sampling.seed != second.sampling.seed
    assert first.context.request_id != second.context.request_id
    assert dataclasses.replace(first.sampling, seed=0) == SamplingParams()
    assert (first.max_tokens, first.n, first.model) == (None, 1, "default")
    assert (first.context.priority, first.context.cache_policy) == (Priority.STANDARD, CachePolicy.READ_WRITE)
    assert (first.context.tenant, first.context.namespace, first.context.attempt) == ("default", "default", 1)


@pytest.mark.parametrize(
    ("output", "text", "ids"),
    [
        (router_pb2.OUTPUT_UNSPECIFIED, "ab", [2]),
        (router_pb2.OUTPUT_TEXT, "ab", [2]),  # tokens only where log-probabilities were asked for
        (router_pb2.OUTPUT_TOKENS, "", [1, 2]),
        (router_pb2.OUTPUT_TEXT_AND_TOKENS, "ab", [1, 2]),
    ],
)
def test_a_delta_carries_what_was_asked_for(output: Any, text: str, ids: list[int]) -> None:
    delta = Delta(choice=0, sequence=0, text="ab", tokens=(Token(1), Token(2, -0.5)), total_tokens=2)
    sent = wire.event_pb(delta, output=output).delta
    assert (sent.text, [each.id for each in sent.tokens], sent.total_tokens) == (text, ids, 2)


def test_a_format_whose_digest_is_not_that_of_its_fields_is_a_mismatch() -> None:
    message = wire.kv_format_pb(KV_FORMAT)
    message.layers += 1
    with pytest.raises(FormatMismatch) as error:
        wire.kv_format(message)
    assert error.value.field == "kv_format"


def test_a_ticket_holds_well_formed_keys() -> None:
    ticket = Ticket(blocks=(BlockRef(b"short", 1, 16),), lease=LEASE, format_digest=bytes(16))
    refused(handoff.ticket, handoff.ticket_pb(ticket), "ticket.blocks")
    refused(handoff.decode_order, changed_ticket(ticket), "ticket.blocks")


def changed_ticket(ticket: Ticket) -> decode_pb2.DecodeRequest:
    message: decode_pb2.DecodeRequest = changed(DECODE)
    message.ticket.CopyFrom(handoff.ticket_pb(ticket))
    return message


def test_enumerations_that_we_do_not_know_are_refused() -> None:
    refused(lambda _: wire.finish(99), common_pb2.Token(), "finish")  # type: ignore[arg-type]
    refused(worker.worker_info, worker_pb2.WorkerInfo(), "role")


@pytest.mark.parametrize(
    ("read", "message"),
    [(wire.event, router_pb2.GenerateResponse()), (handoff.prefill_event, prefill_pb2.PrefillResponse())],
)
def test_an_event_that_we_do_not_know_is_a_defect_and_no_silence(
    read: Callable[[Any], object], message: Message
) -> None:
    with pytest.raises(Internal):
        read(message)


@pytest.mark.parametrize("writer", ["", "a/b", "..", "x" * 65, "a\n", "ä"])
def test_a_writers_name_can_be_part_of_a_file_name(writer: str) -> None:
    refused(lambda _: messages.writer_id(writer), common_pb2.Token(), "writer_id")
    assert messages.writer_id("Writer-1") == "Writer-1"


def test_places_in_the_store_are_read_as_they_were_written() -> None:
    places = (BlockSlot(BlockRef(bytes(16), 2**64 - 1, 16), 2**32 - 1),)
    reservations = (Reservation(bytes(range(16)), 3, 4),)
    written = tuple(messages.WrittenBlock(places[0], checksum) for checksum in (None, 0, 2**64 - 1))
    assert messages.block_slots(messages.block_slots_pb(places)) == places
    assert messages.reservations(messages.reservations_pb(reservations)) == reservations
    assert messages.written_blocks(messages.written_blocks_pb(written), block_tokens=16) == written


@pytest.mark.parametrize("tokens", [0, 17])
def test_a_block_holds_from_one_token_to_a_blockful(tokens: int) -> None:
    block = kvstore_pb2.WrittenBlock(block=common_pb2.BlockRef(key=bytes(16), tokens=tokens))
    refused(lambda _: messages.written_blocks([block], block_tokens=16), block, "tokens")


def test_a_lease_lives_for_some_time() -> None:
    for seconds in (0.0, -1.0):
        refused(messages.lease_seconds, wire.duration_pb(seconds), "lease_duration")


@pytest.mark.parametrize("field", ["priority", "cache_policy", "output"])
def test_an_enum_value_that_is_not_known_is_refused_by_name(field: str) -> None:
    message = router_pb2.GenerateRequest(text="hello", **{field: 99})
    with pytest.raises(InvalidRequest) as caught:
        asked(message)
    assert caught.value.field == field
