"""One case of the directory: a prompt is stored on one side and found by the other, with Redis failing on the way."""

from __future__ import annotations

import asyncio
import time

from tests.faults.kit.disk import BLOCK_TOKENS, BLOCKS
from tests.faults.kit.hosts import Hosts, Side
from tests.faults.kit.node import StoreNode
from tests.faults.kit.redis import Ask, Outage, RedisCase
from tests.faults.kit.stage import ANSWER_SECONDS, Outcome, assert_calm, new_dice, new_question
from tests.faults.kit.strikes import ended
from tests.support.alone import Alone, Told
from tests.support.faults import STRIKE_SECONDS
from tests.support.routed import Answering, Question, Routed

AWAY = '"the directory is away'
SLOW_SECONDS = 1.0  # more than a node waits for Redis


class RedisScene:
    """Two sides in which one case after the other is played."""

    def __init__(self, hosts: Hosts, alone: Alone, seed: int) -> None:
        self._hosts = hosts
        self._alone = alone
        self._dice = new_dice("redis", seed)
        self._nodes = [StoreNode(side.node) for side in hosts.sides]

    async def play(self, case: RedisCase) -> Outcome:
        """Play a case. Raises AssertionError, when something is wrong."""
        for each in self._hosts.services:
            each.forget_lines()
        await self._both_up()
        question = new_question(self._dice)
        truth = await question.alone(self._alone)
        if case.ask is not Ask.WRITE:
            await self._ask(self._hosts.far, question, truth)
            await self._told()
        asker = self._hosts.far if case.ask is Ask.WRITE else self._hosts.near
        asker.relay.aim(case.ask.value)
        answering = Answering(question).asked(asker.client)
        asked = None if case.ask is Ask.BEAT else asyncio.create_task(answering)  # a heartbeat comes by itself
        try:
            await asker.relay.struck(STRIKE_SECONDS)
            struck_at = time.monotonic()
            await self._begin(case.blow)
            asked = asked or asyncio.create_task(answering)
            async with asyncio.timeout(ANSWER_SECONDS):
                (await asked).assert_same(truth)
            answered_at = time.monotonic()
            await self._hosts.settled()
            freed_at = time.monotonic()
            if case.lasts:
                await self._both_alone()
        finally:
            await ended(asked or asyncio.create_task(answering))
            await self._end(case.blow)
        await self._both_up()
        returned_at = time.monotonic()
        self._assert_said(case)
        await self._assert_as_before()
        assert_calm(self._hosts.services)
        return Outcome(
            name=case.name,
            blow=case.blow.value,
            recovered=answered_at - struck_at,
            freed=freed_at - answered_at,
            returned=returned_at - struck_at,
        )

    async def _begin(self, blow: Outage) -> None:
        """The outage, for both nodes, while the command is on its way; then it may go on, as far as it comes."""
        redis, relays = self._hosts.redis, [side.relay for side in self._hosts.sides]
        match blow:
            case Outage.STOPPED:
                redis.freeze()
            case Outage.KILLED:
                await asyncio.to_thread(redis.kill)
            case Outage.SWALLOWED:
                for relay in relays:
                    relay.swallow()
            case Outage.REFUSED:
                for relay in relays:
                    await relay.refuse()
            case Outage.EMPTIED:
                await asyncio.to_thread(redis.admin.flushall)
            case Outage.SLOW:
                await asyncio.sleep(SLOW_SECONDS)
        for relay in relays:
            relay.release()

    async def _end(self, blow: Outage) -> None:
        if blow is Outage.STOPPED:
            self._hosts.redis.thaw()
        if blow is Outage.KILLED:
            await asyncio.to_thread(self._hosts.redis.start)
        for side in self._hosts.sides:
            await side.relay.heal()

    async def _ask(self, side: Side, question: Question, truth: list[Told]) -> Routed:
        routed = await Answering(question).asked(side.client)
        routed.assert_same(truth)
        await self._hosts.settled()
        return routed

    async def _both_up(self) -> None:
        """Redis knows both nodes and all that they hold, and each node knows the other."""
        for node in self._nodes:
            await node.until(lambda status: status.directory.up and status.directory.nodes == 1)
        await self._told()

    async def _both_alone(self) -> None:
        for node in self._nodes:
            await node.until(lambda status: not status.directory.up)

    async def _told(self) -> None:
        for node in self._nodes:
            await node.until(lambda status: not status.directory.waiting)

    def _assert_said(self, case: RedisCase) -> None:
        """Each node says once that it serves alone, however often it failed to reach Redis."""
        for side in self._hosts.sides:
            said = [line for line in side.node.lines if AWAY in line]
            assert len(said) == 1 or (not case.lasts and not said), f"a node said {len(said)} times that Redis is away"

    async def _assert_as_before(self) -> None:
        """What one side stores now the other side finds, to the last block, and takes from its node."""
        question = new_question(self._dice)
        truth = await question.alone(self._alone)
        near = self._nodes[1]
        fetched = (await near.status()).peers.fetched
        await self._ask(self._hosts.far, question, truth)
        await self._told()
        routed = await self._ask(self._hosts.near, question, truth)
        assert routed.usage.cached.store == BLOCKS * BLOCK_TOKENS, f"{routed.usage} is not the whole prompt"
        assert (await near.status()).peers.fetched >= fetched + BLOCKS
