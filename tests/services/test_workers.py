"""Prefill and decode workers as the router meets them: over their contracts, one call at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.alone import Alone
from tests.support.cluster import Cluster, Shape, started, tiny_model
from tests.support.pairs import SPAN, STOPS, Pair, fresh_prompt, ids, paired, soon
from twostroke.cluster import Role
from twostroke.errors import (
    BlocksMissing,
    FormatMismatch,
    InvalidRequest,
    Overloaded,
    Superseded,
    TwostrokeError,
    WorkerLost,
)
from twostroke.handoff import First, Handover, Progress, Ticket
from twostroke.kv.refs import BlockRef, Lease
from twostroke.rpc.channel import connect
from twostroke.rpc.interceptor import MAX_BESIDE
from twostroke.rpc.status import domain_errors
from twostroke.telemetry import Span
from twostroke.text.bundle import MAX_BUNDLE_BYTES, TokenizerBundle
from twostroke.types import FinishReason, StopConditions
from twostroke.v1 import worker_pb2, worker_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")

again = pytest.mark.parametrize("attempt", [1, 2], ids=["the same attempt", "a newer one"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(model: Path) -> AsyncIterator[tuple[Cluster, Alone]]:
    async with Alone.started(model) as alone, started(Shape(model=model, tokens_per_step=64)) as cluster:
        yield cluster, alone


@pytest_asyncio.fixture(loop_scope="module")
async def pair(running: tuple[Cluster, Alone]) -> AsyncIterator[Pair]:
    cluster, alone = running
    async with paired(cluster, alone) as both:
        yield both


async def test_a_prompt_is_progress_then_a_first_token_then_a_ticket(pair: Pair) -> None:
    order = pair.order(fresh_prompt(200))
    events = await pair.prefilled(order)
    progress = [event for event in events if isinstance(event, Progress)]
    first, last, handover = events[-3:]
    assert isinstance(first, First)
    assert isinstance(handover, Handover)
    assert len(progress) == len(events) - 2  # at least one for each step of 64 tokens
    assert [each.computed for each in progress] == sorted(each.computed for each in progress)
    assert last == progress[-1]
    assert handover.ticket is not None
    assert [block.key for block in handover.ticket.blocks][:12] == list(pair.keys(order))
    assert sum(block.tokens for block in handover.ticket.blocks) == 200
    pair.cluster.prefill[0].store.release(handover.ticket.lease)


@pytest.mark.parametrize("length", [1, 16, 500])
async def test_a_ticket_is_all_that_decode_needs(pair: Pair, length: int) -> None:
    order = await pair.handed_over(pair.order(fresh_prompt(length)))
    news = await pair.decoded(order)
    pair.give_up(order)
    assert (*order.emitted, *ids(news)) == await pair.truth(order.prompt)
    assert news[-1].finish is FinishReason.LENGTH
    assert news[0].admitted is not None
    assert news[0].admitted.computed == 0
    assert all(written.admitted is None for written in news[1:])


async def test_an_answer_goes_on_from_the_tokens_that_exist(pair: Pair) -> None:
    prompt = fresh_prompt(60)
    truth = await pair.truth(prompt)
    for emitted in range(STOPS.max_tokens):
        news = await pair.decoded(pair.order(prompt, emitted=truth[:emitted]))
        assert ids(news) == truth[emitted:]


async def test_of_an_answer_that_was_at_its_end_nothing_is_computed(pair: Pair) -> None:
    prompt = fresh_prompt(60)
    news = await pair.decoded(pair.order(prompt, emitted=await pair.truth(prompt)))
    assert ids(news) == ()
    assert news[0].admitted is not None
    assert news[0].admitted.computed == 0


async def test_no_more_callers_watch_a_worker_than_it_allows(pair: Pair) -> None:
    channel = connect(pair.decode.address)
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    request = worker_pb2.WatchLoadRequest(interval_ms=60_000)
    watching = [stub.WatchLoad(request, timeout=30) for _ in range(MAX_BESIDE)]
    with pytest.raises(Overloaded), domain_errors():  # the router of this cluster watches too
        await asyncio.gather(*(call.read() for call in watching))
    for call in watching:
        call.cancel()
    await channel.close()


async def test_a_few_missing_blocks_are_computed_and_many_are_asked_for_again(pair: Pair) -> None:
    for length in (100, 500):
        order = pair.order(fresh_prompt(length))
        lease = Lease(id="ended", seconds=30.0, incarnation=pair.cluster.node.incarnation)
        gone = tuple(BlockRef(key=key, generation=1, tokens=16) for key in pair.keys(order))
        assert pair.decode.info is not None
        ticket = Ticket(blocks=gone, lease=lease, format_digest=pair.decode.info.kv_format.digest)
        if length == 100:
            assert ids(await pair.decoded(replace(order, ticket=ticket))) == await pair.truth(order.prompt)
        else:
            with pytest.raises(BlocksMissing):
                await pair.decoded(replace(order, ticket=ticket))


async def test_blocks_are_loaded_ahead_once(pair: Pair) -> None:
    order = await pair.handed_over(pair.order(fresh_prompt(160)))
    assert order.ticket is not None
    for _ in range(2):
        await pair.decode.prefetch(pair.whole(order), pair.keys(order), order.ticket.lease, Span(None))
        assert await pair.cluster.decode[0].engine.cached_blocks(pair.keys(order)) == 10
    news = await pair.decoded(order)
    pair.give_up(order)
    assert news[0].admitted is not None
    assert news[0].admitted.local >= 160 - 16


@pytest.mark.parametrize("role", Role)
async def test_an_order_for_another_worker_or_another_format_is_refused(pair: Pair, role: Role) -> None:
    member, ask = (pair.prefill, pair.prefilled) if role is Role.PREFILL else (pair.decode, pair.decoded)
    assert member.info is not None
    strangers: list[tuple[object, type[TwostrokeError]]] = [
        (replace(member.info, incarnation="an earlier life"), WorkerLost),
        (replace(member.info, kv_format=replace(member.info.kv_format, weight_mode="int8")), FormatMismatch),
    ]
    for stranger, refusal in strangers:
        member.info = stranger
        with pytest.raises(refusal):
            await ask(pair.order(fresh_prompt(20)))


@pytest.mark.parametrize("role", Role)
async def test_a_token_that_the_model_does_not_have_is_named(pair: Pair, role: Role) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await (pair.prefilled if role is Role.PREFILL else pair.decoded)(pair.order((1, 2, 70_000)))
    assert caught.value.field == "prompt"


@again
async def test_an_answer_that_is_asked_for_again_ends_the_run_that_nobody_reads(pair: Pair, attempt: int) -> None:
    order = pair.order(fresh_prompt(40), stops=StopConditions(max_tokens=3_000, ignore_eos=True))
    newer = replace(order, context=replace(order.context, attempt=attempt), stops=STOPS)
    async with aclosing(pair.decode.decode(order, soon(), SPAN)) as news:
        await anext(news)
        assert ids(await pair.decoded(newer)) == await pair.truth(order.prompt)
        with pytest.raises(Superseded):
            [written async for written in news]


@again
async def test_a_prompt_that_is_asked_for_again_ends_the_run_that_nobody_reads(pair: Pair, attempt: int) -> None:
    order = pair.order(fresh_prompt(3_000))
    newer = replace(order, context=replace(order.context, attempt=attempt))
    async with aclosing(pair.prefill.prefill(pair.whole(order), soon(), SPAN)) as events:
        await anext(events)
        handed_over = await pair.handed_over(newer)
        with pytest.raises(Superseded):
            [event async for event in events]
    news = await pair.decoded(handed_over)
    pair.give_up(handed_over)
    assert (*handed_over.emitted, *ids(news)) == await pair.truth(order.prompt)


async def test_an_older_attempt_never_comes_back(pair: Pair) -> None:
    order = pair.order(fresh_prompt(40), stops=StopConditions(max_tokens=3_000, ignore_eos=True))
    newer = replace(order, context=replace(order.context, attempt=2))
    async with aclosing(pair.decode.decode(newer, soon(), SPAN)) as news:
        await anext(news)
        with pytest.raises(Superseded):
            await pair.decoded(order)
        await anext(news)  # undisturbed


async def test_a_worker_sends_the_tokenizer_that_it_announces(pair: Pair) -> None:
    for member in (pair.prefill, pair.decode):
        bundle = TokenizerBundle.from_bytes(await member.tokenizer(MAX_BUNDLE_BYTES))
        assert member.info is not None
        assert bundle.digest == member.info.model.tokenizer_digest
