"""Blocks that are moved once however many want them."""

from __future__ import annotations

import asyncio

import pytest

from twostroke.worker.inflight import InFlight


async def test_a_key_belongs_to_its_first_task_until_that_ends() -> None:
    gate = asyncio.Event()
    async with InFlight.opened() as flying:
        first = flying.begin([b"a", b"b"], gate.wait())
        second = flying.begin([b"b", b"c"], asyncio.sleep(0))
        await second
        assert b"a" in flying
        assert b"b" in flying
        assert b"c" not in flying
        gate.set()
        await first
        assert b"a" not in flying
        assert b"b" not in flying


async def test_waiting_answers_whether_somebody_was_there_and_has_ended() -> None:
    gate = asyncio.Event()
    async with InFlight.opened() as flying:
        assert not await flying.ended([b"a"], at_most=60)
        flying.begin([b"a"], gate.wait())
        assert not await flying.ended([b"x", b"a"], at_most=0)
        gate.set()
        assert await flying.ended([b"x", b"a"], at_most=60)


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
async def test_whoever_waits_for_one_that_comes_to_nothing_is_told_that_it_ended(how: str) -> None:
    gate = asyncio.Event()

    async def broken() -> None:
        await gate.wait()
        raise OSError

    async with InFlight.opened() as flying:
        task = flying.begin([b"a"], broken())
        waiting = asyncio.create_task(flying.ended([b"a"], at_most=60))
        await asyncio.sleep(0)
        gate.set() if how == "fails" else task.cancel()
        assert await waiting
        assert b"a" not in flying
        with pytest.raises((OSError, asyncio.CancelledError)):
            await task


async def test_one_that_gives_up_waiting_ends_nobody_else() -> None:
    gate = asyncio.Event()
    async with InFlight.opened() as flying:
        task = flying.begin([b"a"], gate.wait())
        waiting = asyncio.create_task(flying.ended([b"a"], at_most=60))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert not task.done()
        gate.set()
        assert await task


async def test_a_key_that_is_taken_up_again_is_not_waited_for_twice_and_another_one_is() -> None:
    gates = [asyncio.Event() for _ in range(3)]
    async with InFlight.opened() as flying:
        first = flying.begin([b"a"], gates[0].wait())
        first.add_done_callback(lambda _: flying.begin([b"a", b"b"], gates[1].wait()))
        waiting = asyncio.create_task(flying.ended([b"a", b"b"], at_most=60))
        gates[0].set()
        await first
        await asyncio.sleep(0)
        assert not waiting.done()
        flying._tasks[b"b"].add_done_callback(lambda _: flying.begin([b"a", b"b"], gates[2].wait()))
        gates[1].set()
        assert await waiting
        assert b"a" in flying
        gates[2].set()


async def test_leaving_waits_for_what_is_under_way() -> None:
    ended = []

    async def slow() -> None:
        await asyncio.sleep(0)
        ended.append(True)

    async with InFlight.opened() as flying:
        flying.begin([b"a"], slow())
    assert ended
