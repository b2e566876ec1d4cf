"""Copies that end too late: what they bring is not used, and where they write nothing else has come meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.alone import Alone
from tests.support.cluster import Shape, started, tiny_model
from tests.support.pairs import Pair, fresh_prompt, ids, paired
from tests.support.stores import copies_held, copies_waiting, eventually

BLOCK = 8 << 10  # bytes, of the tiny model
SLOTS, PAGES = 24, 16  # both few, so that whoever comes next gets what was given back


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    model = tiny_model(tmp_path / "model")
    shape = Shape(model=model, arena_bytes=(SLOTS + 1) * BLOCK, kv_bytes=f"{PAGES * BLOCK}")
    async with Alone.started(model) as alone, started(shape) as cluster, paired(cluster, alone) as both:
        assert cluster.prefill[0].kv_format.block_bytes == BLOCK
        yield both


async def test_a_block_whose_slot_was_filled_anew_under_a_late_copy_is_computed_instead(pair: Pair) -> None:
    node, decode = pair.cluster.node, pair.cluster.decode[0]
    blocks = node.blocks(node.incarnation)
    order = await pair.handed_over(pair.order(fresh_prompt(160)))
    assert order.ticket is not None
    with copies_held(decode.store) as go:
        decoding = asyncio.create_task(pair.decoded(order))
        await eventually(lambda: copies_waiting(decode.store) == 1)
        blocks.release([order.ticket.lease.id])  # as its end by time does
        others = [await pair.handed_over(pair.order(fresh_prompt(190))) for _ in range(2)]
        assert blocks.lookup(pair.keys(order)) == 0
        go.set()
        news = await decoding
    assert (*order.emitted, *ids(news)) == await pair.truth(order.prompt)
    assert news[0].admitted is not None
    assert news[0].admitted.computed == 160
    for other in others:
        assert (*other.emitted, *ids(await pair.decoded(other))) == await pair.truth(other.prompt)
        pair.give_up(other)


async def test_pages_that_a_late_copy_may_write_to_are_nobody_elses_until_it_has_ended(pair: Pair) -> None:
    decode = pair.cluster.decode[0]
    order = await pair.handed_over(pair.order(fresh_prompt(160)))
    with copies_held(decode.store) as go:
        leaving = asyncio.create_task(pair.decoded(order))
        await eventually(lambda: copies_waiting(decode.store) == 1)
        leaving.cancel()
        await asyncio.wait({leaving})
        small, large = pair.order(fresh_prompt(60)), pair.order(fresh_prompt(150))
        assert ids(await pair.decoded(small)) == await pair.truth(small.prompt)  # in the pages that are left
        waiting = asyncio.create_task(pair.decoded(large))  # has too few of them
        await eventually(lambda: decode.engine.load().waiting == 1)
        assert decode.engine.load().lent_pages == 10 + 4  # what the small one filled is to be copied behind it
        go.set()
        assert ids(await waiting) == await pair.truth(large.prompt)
    news = await pair.decoded(order)  # what came late is true
    pair.give_up(order)
    assert (*order.emitted, *ids(news)) == await pair.truth(order.prompt)
