"""Protobuf and domain, both ways: what is written is read back, what is malformed is refused by name, noise is safe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke import limits, wire
from twostroke.access.caller import Caller
from twostroke.cluster import ModelInfo, Role, WorkerInfo, WorkerLoad
from twostroke.errors import TwostrokeError
from twostroke.handoff import Admitted, DecodeOrder, First, Handover, PrefillOrder, Progress, Ticket, Written
from twostroke.kv.format import KvFormat
from twostroke.kv.refs import BlockRef, Lease
from twostroke.types import (
    CachedTokens,
    CachePolicy,
    ChoiceFinished,
    Delta,
    FinishReason,
    GenerateRequest,
    Priority,
    RequestContext,
    SamplingParams,
    Started,
    StopConditions,
    Token,
    Usage,
)
from twostroke.types import Message as Turn
from twostroke.v1 import router_pb2
from twostroke.wire import handoff, worker

uint32, uint64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
names = st.text(min_size=1, max_size=12)
digests = st.binary(min_size=16, max_size=16)
single = st.floats(width=32, allow_nan=False)
ids = st.lists(uint32, max_size=6).map(tuple)
id_sets = st.frozensets(uint32, max_size=6)
nanoseconds = st.integers(0, 2**48).map(lambda count: count / 1e9)
finishes = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])


def prompts(unit: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(unit, min_size=1, max_size=6).map(tuple)


def made(kind: type[Any], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(kind, **fields)


contexts = made(
    RequestContext,
    request_id=names,
    attempt=st.integers(1, 2**32 - 1),
    tenant=names,
    namespace=names,
    priority=st.sampled_from(Priority),
    cache_policy=st.sampled_from(CachePolicy),
    session=st.none() | st.text(max_size=12),
    salt=st.text(max_size=12),
)
samplings = made(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=st.integers(0, limits.MAX_TOKENS),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 10),
    logit_bias=st.dictionaries(uint32, st.floats(-100, 100, width=32), max_size=4),
    seed=uint64,
    logprobs=st.none() | st.integers(0, limits.MAX_LOGPROBS),
)
stops = st.integers(1, limits.MAX_TOKENS).flatmap(
    lambda most: made(
        StopConditions,
        max_tokens=st.just(most),
        min_tokens=st.integers(0, most),
        stop_token_ids=id_sets,
        ignore_eos=st.booleans(),
    )
)
tokens = st.builds(Token, uint32) | st.builds(
    Token, uint32, single, st.lists(st.tuples(uint32, single), max_size=3).map(tuple)
)
many_tokens = st.lists(tokens, max_size=4).map(tuple)
caches = made(CachedTokens, local=uint32, store=uint32)
usages = made(Usage, prompt_tokens=uint32, completion_tokens=uint32, cached=caches, kept_blocks=st.none() | uint32)
formats = made(
    KvFormat,
    weights_digest=digests,
    rope_digest=digests,
    **dict.fromkeys(("model", "weight_mode", "dtype", "adapter", "layout", "hash_scheme"), names),
    **dict.fromkeys(("layers", "kv_heads", "head_dim", "block_tokens"), uint32),
)
leases = made(Lease, id=names, seconds=nanoseconds, incarnation=names)
refs = st.builds(BlockRef, digests, uint64, uint32)
tickets = made(Ticket, blocks=st.lists(refs, max_size=4).map(tuple), lease=leases, format_digest=digests)
prefill_orders = made(
    PrefillOrder,
    context=contexts,
    prompt=prompts(uint32),
    sampling=samplings,
    stops=stops,
    choices=st.integers(1, limits.MAX_CHOICES),
    lease_id=st.binary(min_size=16, max_size=16).map(bytes.hex),
)
decode_orders = made(
    DecodeOrder,
    context=contexts,
    prompt=prompts(uint32),
    emitted=ids,
    sampling=samplings,
    stops=stops,
    choice=st.integers(0, limits.MAX_CHOICES - 1),
    ticket=st.none() | tickets,
)
prefill_events = (
    st.builds(Progress, uint32, uint32, st.none() | leases)
    | st.builds(First, st.lists(st.tuples(tokens, st.none() | finishes), max_size=3).map(tuple), caches)
    | st.builds(Handover, st.none() | tickets)
)
writtens = made(
    Written,
    tokens=many_tokens,
    finish=st.none() | finishes,
    admitted=st.none() | st.builds(Admitted, uint32, uint32, uint32),
)
models = made(
    ModelInfo,
    context_tokens=uint32,
    vocab_size=uint32,
    end_token_ids=id_sets,
    tokenizer_digest=digests,
    **{each: st.text(max_size=8) for each in ("id", "architecture", "weight_mode", "fingerprint")},
)
workers = made(
    WorkerInfo,
    incarnation=names,
    role=st.sampled_from(Role),
    model=models,
    kv_format=formats,
    device=names,
    pages=uint32,
    max_running=uint32,
    max_open=uint32,
)
loads = made(
    WorkerLoad,
    waiting_tokens=uint64,
    steps=uint64,
    draining=st.booleans(),
    **dict.fromkeys(("running", "waiting", "free_pages", "evictable_pages"), uint32),
)
turns = made(Turn, role=st.sampled_from(sorted(limits.ROLES)), content=st.text(max_size=12), name=st.none() | names)
callers = made(  # tenant, namespace and attempt are not a caller's to choose
    RequestContext,
    request_id=names,
    priority=st.sampled_from(Priority),
    cache_policy=st.sampled_from(CachePolicy),
    session=st.none() | names,
    salt=st.text(max_size=12),
)


@st.composite
def generate_requests(draw: st.DrawFn) -> GenerateRequest:
    context = draw(callers)
    keeps = context.cache_policy is not CachePolicy.BYPASS
    prompt = draw(names | prompts(uint32) | prompts(turns))
    most = draw(st.none() | st.integers(1, limits.MAX_TOKENS))
    return GenerateRequest(
        context=context,
        prompt=prompt,
        sampling=draw(samplings),
        max_tokens=most,
        min_tokens=draw(st.integers(0, most or limits.MAX_TOKENS)),
        stop_token_ids=draw(id_sets),
        ignore_eos=draw(st.booleans()),
        stop_strings=draw(st.lists(names, max_size=3).map(tuple)),
        n=draw(st.integers(1, limits.MAX_CHOICES)),
        model=draw(names),
        continue_final_message=isinstance(prompt[0], Turn) and draw(st.booleans()),
        keep_for=draw(st.none() | st.integers(1, 2**46).map(lambda count: count / 1e9)) if keeps else None,
    )


events = (
    made(Started, request_id=names, model=names, seed=uint64, prompt_tokens=uint32, fingerprint=names)
    | made(Delta, choice=uint32, sequence=uint32, text=st.text(), tokens=many_tokens, total_tokens=uint32)
    | st.builds(ChoiceFinished, uint32, finishes)
    | usages
)


@dataclasses.dataclass(frozen=True)
class Mapping:
    """One kind of message: its domain values, and how they are written and read."""

    values: st.SearchStrategy[Any]
    write: Callable[[Any], Message]
    read: Callable[[Any], Any]


ADDRESSED = {"incarnation": "w", "format_digest": bytes(16)}
BOTH = router_pb2.OUTPUT_TEXT_AND_TOKENS
MAPPINGS = {
    "context": Mapping(contexts, wire.context_pb, wire.context),
    "sampling": Mapping(samplings, wire.sampling_pb, wire.sampling),
    "stops": Mapping(stops, wire.stops_pb, wire.stops),
    "token": Mapping(tokens, wire.token_pb, wire.token),
    "usage": Mapping(usages, wire.usage_pb, wire.usage),
    "kv_format": Mapping(formats, wire.kv_format_pb, wire.kv_format),
    "duration": Mapping(nanoseconds, wire.duration_pb, wire.seconds),
    "generate_request": Mapping(
        generate_requests(),
        lambda value: wire.generate_request_pb(value, output=BOTH),
        partial(wire.generate_request, caller=Caller()),
    ),
    "event": Mapping(events, lambda value: wire.event_pb(value, output=BOTH), wire.event),
    "ticket": Mapping(tickets, handoff.ticket_pb, handoff.ticket),
    "prefill_order": Mapping(
        prefill_orders, lambda value: handoff.prefill_order_pb(value, **ADDRESSED), handoff.prefill_order
    ),
    "prefill_event": Mapping(prefill_events, handoff.prefill_event_pb, handoff.prefill_event),
    "decode_order": Mapping(
        decode_orders, lambda value: handoff.decode_order_pb(value, **ADDRESSED), handoff.decode_order
    ),
    "written": Mapping(writtens, lambda value: handoff.written_pb(value, sequence=1, total_tokens=2), handoff.written),
    "worker_info": Mapping(workers, worker.worker_info_pb, worker.worker_info),
    "load": Mapping(loads, worker.load_pb, worker.load),
}
each_mapping = pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS)


@each_mapping
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_what_is_written_is_read_back(mapping: Mapping, data: st.DataObject) -> None:
    value = data.draw(mapping.values)
    message = mapping.write(value)
    assert mapping.read(type(message).FromString(message.SerializeToString())) == value


@each_mapping
@given(data=st.data(), noise=st.binary(max_size=3), cut=st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_whatever_arrives_reading_it_ends_with_a_value_or_a_typed_error(
    mapping: Mapping, data: st.DataObject, noise: bytes, cut: int
) -> None:
    message = mapping.write(data.draw(mapping.values))
    sent = message.SerializeToString()
    at = data.draw(st.integers(0, len(sent)))
    try:
        damaged = type(message).FromString(sent[:at] + noise + sent[at + cut :])
    except DecodeError:
        return
    with suppress(TwostrokeError):
        mapping.read(damaged)
