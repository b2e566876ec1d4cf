"""The prefill and decode contracts: orders, progress, tickets, tokens, both ways."""

from __future__ import annotations

from twostroke import limits
from twostroke.errors import Internal, InvalidRequest
from twostroke.handoff import Admitted, DecodeOrder, First, Handover, PrefillOrder, Progress, Ticket, Written
from twostroke.kv.refs import BlockRef
from twostroke.v1 import common_pb2, decode_pb2, prefill_pb2
from twostroke.wire import common
from twostroke.wire.names import check_keys, check_lease_id, lease, lease_pb


def ticket(message: common_pb2.Ticket) -> Ticket:
    """Read a ticket."""
    check_keys([each.key for each in message.blocks], limits.MAX_TOKENS, field="ticket.blocks")
    return Ticket(
        blocks=tuple(BlockRef(each.key, each.generation, each.tokens) for each in message.blocks),
        lease=lease(message.lease),
        format_digest=message.format_digest,
    )


def ticket_pb(value: Ticket) -> common_pb2.Ticket:
    """Write a ticket."""
    return common_pb2.Ticket(
        blocks=[
            common_pb2.BlockRef(key=each.key, generation=each.generation, tokens=each.tokens) for each in value.blocks
        ],
        lease=lease_pb(value.lease),
        format_digest=value.format_digest,
    )


def prefill_order(message: prefill_pb2.PrefillRequest) -> PrefillOrder:
    """Read and check a prefill order."""
    if not message.prompt:
        raise InvalidRequest("prompt must not be empty", field="prompt")
    if not 1 <= message.choices <= limits.MAX_CHOICES:
        raise InvalidRequest(f"choices must be from 1 to {limits.MAX_CHOICES}", field="choices")
    return PrefillOrder(
        context=common.context(message.context),
        prompt=tuple(message.prompt),
        sampling=common.sampling(message.sampling),
        stops=common.stops(message.stops),
        choices=message.choices,
        lease_id=check_lease_id(message.lease_id),
    )


def prefill_order_pb(value: PrefillOrder, *, incarnation: str, format_digest: bytes) -> prefill_pb2.PrefillRequest:
    """Write a prefill order for one incarnation of a worker."""
    return prefill_pb2.PrefillRequest(
        context=common.context_pb(value.context),
        incarnation=incarnation,
        format_digest=format_digest,
        prompt=value.prompt,
        sampling=common.sampling_pb(value.sampling),
        stops=common.stops_pb(value.stops),
        choices=value.choices,
        lease_id=value.lease_id,
    )


def prefill_event(message: prefill_pb2.PrefillResponse) -> Progress | First | Handover:
    """Read what a prefill worker says."""
    match message.WhichOneof("event"):
        case "progress":
            progress = message.progress
            held = lease(progress.lease) if progress.HasField("lease") else None
            return Progress(progress.computed_tokens, progress.published_blocks, held)
        case "first":
            return First(
                tuple(
                    (common.token(each.token), common.finish(each.finish) if each.HasField("finish") else None)
                    for each in message.first.tokens
                ),
                common.cached(message.first.cached),
            )
        case "result":
            return Handover(ticket(message.result.ticket) if message.result.HasField("ticket") else None)
        case _:
            raise Internal("the prefill worker sent an event that this router does not know")


def prefill_event_pb(value: Progress | First | Handover) -> prefill_pb2.PrefillResponse:
    """Write what a prefill worker says."""
    match value:
        case Progress():
            progress = prefill_pb2.PrefillProgress(
                computed_tokens=value.computed,
                published_blocks=value.published,
                lease=lease_pb(value.lease) if value.lease else None,
            )
            return prefill_pb2.PrefillResponse(progress=progress)
        case First():
            first = prefill_pb2.PrefillFirst(cached=common.cached_pb(value.cached))
            for token, finish in value.tokens:
                first.tokens.add(
                    token=common.token_pb(token), finish=None if finish is None else common.finish_pb(finish)
                )
            return prefill_pb2.PrefillResponse(first=first)
        case Handover():
            result = prefill_pb2.PrefillResult(ticket=ticket_pb(value.ticket) if value.ticket else None)
            return prefill_pb2.PrefillResponse(result=result)


def decode_order(message: decode_pb2.DecodeRequest) -> DecodeOrder:
    """Read and check a decode order."""
    if not message.prompt:
        raise InvalidRequest("prompt must not be empty", field="prompt")
    if message.choice >= limits.MAX_CHOICES:
        raise InvalidRequest(f"choice must be under {limits.MAX_CHOICES}", field="choice")
    return DecodeOrder(
        context=common.context(message.context),
        prompt=tuple(message.prompt),
        emitted=tuple(message.emitted),
        sampling=common.sampling(message.sampling),
        stops=common.stops(message.stops),
        choice=message.choice,
        ticket=ticket(message.ticket) if message.HasField("ticket") else None,
    )


def decode_order_pb(value: DecodeOrder, *, incarnation: str, format_digest: bytes) -> decode_pb2.DecodeRequest:
    """Write a decode order for one incarnation of a worker."""
    return decode_pb2.DecodeRequest(
        context=common.context_pb(value.context),
        incarnation=incarnation,
        format_digest=format_digest,
        prompt=value.prompt,
        emitted=value.emitted,
        sampling=common.sampling_pb(value.sampling),
        stops=common.stops_pb(value.stops),
        choice=value.choice,
        ticket=ticket_pb(value.ticket) if value.ticket else None,
    )


def written(message: decode_pb2.DecodeResponse) -> Written:
    """Read a decode worker's message."""
    news = message.admission
    return Written(
        tokens=tuple(common.token(each) for each in message.tokens),
        finish=common.finish(message.finish) if message.HasField("finish") else None,
        admitted=Admitted(news.local, news.store, news.computed) if message.HasField("admission") else None,
    )


def written_pb(value: Written, *, sequence: int, total_tokens: int) -> decode_pb2.DecodeResponse:
    """Write a decode worker's message, counted so that a reader sees gaps."""
    news = value.admitted
    return decode_pb2.DecodeResponse(
        sequence=sequence,
        tokens=[common.token_pb(each) for each in value.tokens],
        total_tokens=total_tokens,
        finish=None if value.finish is None else common.finish_pb(value.finish),
        admission=decode_pb2.Admission(local=news.local, store=news.store, computed=news.computed) if news else None,
    )
