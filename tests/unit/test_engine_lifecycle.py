"""Leaving, failing and closing: every page comes back and every waiter gets an answer."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from tests.support.engines import Fragile, answer, asked, engine_of, outputs_of, prompt_of, tiny
from twostroke.engine.engine import Engine, EngineSettings
from twostroke.engine.mode import KvMode
from twostroke.errors import ContextTooLong, Internal, InvalidRequest, Overloaded, Unavailable


async def reached(model: Fragile) -> None:
    """Return once a step waits inside the model."""
    assert await asyncio.to_thread(model.entered.wait, 30)


@pytest.mark.parametrize("taken", [0, 1, 2, 5])
async def test_leaving_after_any_number_of_outputs_frees_everything(taken: int) -> None:
    request = replace(asked(prompt_of(40), max_tokens=200), export=True)
    async with engine_of(max_chunk=16) as engine, engine.submit(request) as outputs:
        for _ in range(taken):
            output = await anext(outputs)
            engine.release_pages([block.page for block in output.filled])


async def test_leaving_while_a_step_runs_frees_everything_it_will_bring() -> None:
    model = Fragile()
    async with engine_of(model) as engine:
        async with engine.submit(replace(asked([*prompt_of(40), model.WAITS]), export=True)):
            await reached(model)
        assert engine.load().busy
        model.gate.set()


async def test_a_cancelled_task_leaves_like_any_other() -> None:
    model = Fragile()
    async with engine_of(model) as engine:
        task = asyncio.create_task(answer(engine, asked([model.WAITS], max_tokens=500)))
        await reached(model)
        task.cancel()
        model.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_outputs_gather_until_they_are_taken_and_none_is_lost() -> None:
    request = asked(prompt_of(17), max_tokens=30)
    async with engine_of() as engine:
        expected = await answer(engine, request)
        async with engine.submit(request) as outputs:
            await engine.idle()
            gathered = [output async for output in outputs]
        assert len(gathered) == 1
        assert gathered[0].tokens == expected.tokens
        assert gathered[0].computed == 46


async def test_borrowed_pages_come_back_when_the_borrower_is_cancelled() -> None:
    model = Fragile()
    async with engine_of(model) as engine:
        running = asyncio.create_task(answer(engine, asked([model.WAITS])))
        await reached(model)
        taking = asyncio.create_task(engine.take_pages(5))
        await asyncio.sleep(0)  # it has posted its command
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        model.gate.set()
        await running


async def test_pages_are_borrowed_as_far_as_they_go_and_given_back_unused() -> None:
    async with engine_of(pages=9) as engine:
        pages = await engine.take_pages(99)
        assert len(pages) == engine.load().lent_pages == 8
        assert await engine.take_pages(1) == []
        waiting = asyncio.create_task(answer(engine, asked(prompt_of(5))))
        engine.release_pages(pages)
        assert len((await waiting).ids) == 12


async def test_pages_that_were_not_borrowed_cannot_be_adopted_or_given_back() -> None:
    async with engine_of() as engine:
        with pytest.raises(Internal):
            await engine.adopt_pages([(3, b"key", 16)])
        engine.release_pages([3])
        assert len((await answer(engine, asked(prompt_of(5)))).ids) == 12


async def test_logits_that_are_not_numbers_fail_their_request_alone() -> None:
    model = Fragile()
    async with engine_of(model) as engine:
        good = asked(prompt_of(20))
        spoiled, given = await asyncio.gather(
            answer(engine, asked([1, 2, model.SPOILS])), answer(engine, good), return_exceptions=True
        )
        assert isinstance(spoiled, Internal)
        assert not isinstance(given, BaseException)
        assert given.ids == (await answer(engine, replace(good, root=b"again"))).ids


@pytest.mark.parametrize("bad", [Fragile.SPOILS, Fragile.GROWS])
async def test_numbers_that_are_none_in_the_midst_of_a_prompt_end_it_alone_and_nothing_of_it_is_cached(
    bad: int,
) -> None:
    clean, other = asked(prompt_of(60), root=b"shared"), asked(prompt_of(20))
    broken = replace(clean, prompt=(*clean.prompt[:20], bad, *clean.prompt[20:]))
    async with engine_of(Fragile(), kv=KvMode.F16, max_chunk=48) as engine:
        spoiled, beside = await asyncio.gather(answer(engine, broken), answer(engine, other), return_exceptions=True)
        assert isinstance(spoiled, Internal)
        assert "not finite" in str(spoiled)
        assert not isinstance(beside, BaseException)
        given = await answer(engine, clean)
        assert given.cached == 0
        assert given.ids == (await answer(engine, replace(clean, root=b"again"))).ids
        assert beside.ids == (await answer(engine, replace(other, root=b"again"))).ids


async def test_a_step_that_raises_fails_its_requests_and_the_engine_goes_on() -> None:
    model = Fragile()
    async with engine_of(model) as engine:
        with pytest.raises(Internal, match="RuntimeError"):
            await answer(engine, asked([1, model.RAISES]))
        assert len((await answer(engine, asked(prompt_of(20)))).ids) == 12


async def test_a_dead_engine_thread_fails_every_waiter_with_a_typed_error() -> None:
    model = Fragile()
    async with Engine.start(EngineSettings(pages=33), model, tiny().kv_format()) as engine:
        watching = asyncio.create_task(engine.watch())
        with pytest.raises(Internal):
            await answer(engine, asked([model.KILLS]))
        with pytest.raises(Internal):
            await watching
        with pytest.raises(Internal):
            await engine.take_pages(1)
        with pytest.raises(Internal):
            await engine.idle()
        with pytest.raises(Internal):
            await answer(engine, asked([1]))
        engine.release_pages([1])  # nobody is left to take it, and nobody minds


async def test_whoever_still_waits_when_the_engine_closes_is_told_so() -> None:
    model = Fragile()
    async with AsyncExitStack() as streams:
        async with Engine.start(EngineSettings(pages=33), model, tiny().kv_format()) as engine:
            outputs = await streams.enter_async_context(engine.submit(asked([model.WAITS], max_tokens=400)))
            await reached(model)
            asking = asyncio.create_task(engine.cached_blocks([b"key"]))
            watching = asyncio.create_task(engine.watch())
            await asyncio.sleep(0)  # it has posted its command
            model.gate.set()
        assert await asking == 0
        await watching
        with pytest.raises(Unavailable):
            async for _ in outputs:  # first what had been generated, then the end
                pass
    with pytest.raises(Unavailable):
        await outputs_of(engine, asked([1]))


async def test_a_model_that_computes_no_numbers_does_not_start() -> None:
    class Broken(Fragile):
        SPOILS = 0  # the token of the warm-up

    with pytest.raises(Internal):
        async with engine_of(Broken()):
            pass


async def test_an_engine_is_empty_and_has_run_when_it_is_ready() -> None:
    async with engine_of(pages=65) as engine:
        load = engine.load()
        assert (load.running, load.waiting, load.free_pages, load.evictable_pages) == (0, 0, 64, 0)
        assert load.steps == 2


@pytest.mark.parametrize(
    ("prompt", "error", "field"), [((), InvalidRequest, "prompt"), (prompt_of(2048), ContextTooLong, "prompt")]
)
async def test_a_request_that_cannot_run_is_refused_on_entry(
    prompt: tuple[int, ...], error: type[InvalidRequest], field: str
) -> None:
    async with engine_of() as engine:
        with pytest.raises(error) as refused:
            async with engine.submit(asked(prompt)):
                pass
        assert refused.value.field == field
        assert len((await answer(engine, asked([1]))).ids) == 12


async def test_more_requests_than_may_be_open_are_refused_on_entry() -> None:
    async with engine_of(max_running=1, max_waiting=1) as engine, AsyncExitStack() as open_ones:
        for _ in range(2):
            await open_ones.enter_async_context(engine.submit(asked(prompt_of(3), max_tokens=1000)))
        with pytest.raises(Overloaded):
            async with engine.submit(asked([1])):
                pass
