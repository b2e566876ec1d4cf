"""The bench client against a scripted server and a scripted clock: tokens are counted, not chunks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.client import Answer, Arrival, BadAnswer, Prompts, Target, steady_rate, tokens_in

Chunk = tuple[float, dict[str, Any]]  # when the client reads it, and what it says


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [{"text": "abc", "index": 0}], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}


def timings(tokens: int) -> dict[str, Any]:
    return {"choices": [{"text": "abc", "index": 0}], "timings": {"predicted_n": tokens}}


ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}, "index": 0}]}
LAST = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}}
THREE_A_CHUNK: tuple[Chunk, ...] = ((1.0, ROLE), (2.0, usage(3)), (2.6, usage(6)), (3.5, usage(9)), (3.75, LAST))


@dataclass
class Script:
    """Sends chunks one by one, each when the client has read the one before: the clock is told what time that is."""

    chunks: Sequence[Chunk]
    status: int = 200
    now: float = 0.0
    asked: list[dict[str, Any]] = field(default_factory=list)
    read: asyncio.Event = field(default_factory=asyncio.Event)

    def clock(self) -> float:
        self.read.set()
        return self.now

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        response = web.StreamResponse(status=self.status)
        await response.prepare(request)
        for at, event in self.chunks:
            self.now = at
            self.read.clear()
            await response.write(b"data: " + json.dumps(event).encode() + b"\n")
            await self.read.wait()
        await response.write(b"\ndata: [DONE]\n\n")
        return response


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[Target]:
    app = web.Application()
    app.router.add_post("/v1/completions", script.serve)
    async with TestServer(app) as server, aiohttp.ClientSession(server.make_url("/")) as session:
        yield Target(session=session, model="default", fields={"more": 1}, clock=script.clock)


async def test_the_first_token_is_the_first_chunk_that_brings_one_and_not_an_empty_role() -> None:
    async with scripted(Script(THREE_A_CHUNK)) as target:
        answer = await target.answer([5, 6, 7], 9)
    assert answer.first_seconds == 2.0
    assert answer.tokens == 9


async def test_a_gap_before_several_tokens_is_spread_over_them_and_chunk_gaps_are_told_apart() -> None:
    async with scripted(Script(THREE_A_CHUNK)) as target:
        answer = await target.answer([5, 6, 7], 9)
    assert answer.chunk_gaps() == pytest.approx([0.6, 0.9])
    assert answer.token_gaps() == pytest.approx([0.2, 0.2, 0.2, 0.3, 0.3, 0.3])


@pytest.mark.parametrize("count", [usage, timings])
async def test_tokens_are_counted_by_what_the_server_says(count: Callable[[int], dict[str, Any]]) -> None:
    async with scripted(Script(((1.0, count(1)), (2.0, count(4))))) as target:
        assert (await target.answer([5], 4)).arrivals == (Arrival(1.0, 1), Arrival(2.0, 4))


async def test_it_asks_for_an_exact_greedy_length_and_running_counts() -> None:
    script = Script(((1.0, usage(2)),))
    async with scripted(script) as target:
        await target.answer([5, 6], 2)
    assert script.asked == [
        {
            "model": "default",
            "prompt": [5, 6],
            "max_tokens": 2,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "more": 1,
        }
    ]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (Script(((1.0, usage(1)),)), "1 tokens came, 4 were asked for"),
        (Script(()), "0 tokens came"),
        (Script(((1.0, {"choices": [{"text": "abc"}]}),)), "without a running count"),
        (Script(((1.0, {"error": {"message": "out of pages"}}),)), "out of pages"),
        (Script((), status=503), "status 503"),
    ],
)
async def test_an_answer_that_cannot_be_measured_is_refused(script: Script, words: str) -> None:
    async with scripted(script) as target:
        with pytest.raises(BadAnswer, match=words):
            await target.answer([5], 4)


@pytest.mark.parametrize("line", [b"\n", b": still here\n", b"event: message\n", b"data: [DONE]\n"])
def test_lines_without_an_event_say_nothing_about_tokens(line: bytes) -> None:
    assert tokens_in(line) is None


def answer_of(*arrivals: tuple[float, int]) -> Answer:
    return Answer(0.0, tuple(Arrival(at, tokens) for at, tokens in arrivals))


def test_the_steady_rate_counts_only_the_time_when_every_stream_ran() -> None:
    early = answer_of(*((float(at), 10 * at) for at in range(1, 5)))  # 10 tokens a second from 1 to 4
    late = answer_of(*((2.0 + at, 1 + 20 * at) for at in range(5)))  # 20 a second from 2 to 6
    assert steady_rate([early, late]) == pytest.approx((20 + 40) / 2)


def test_streams_that_never_ran_together_have_no_rate() -> None:
    with pytest.raises(BadAnswer, match="while all of them ran"):
        steady_rate([answer_of((1.0, 1), (2.0, 50)), answer_of((3.0, 1), (4.0, 50))])


def test_gaps_that_overlap_a_time_are_those_of_that_time() -> None:
    answer = answer_of((1.0, 1), (2.0, 2), (5.0, 3), (6.0, 4))
    assert answer.chunk_gaps(2.0, 5.0) == [3.0]
    assert answer.chunk_gaps(4.0, 5.5) == [3.0, 1.0]
    assert answer.chunk_gaps(2.5) == [3.0, 1.0]


def test_prompts_differ_from_their_first_token_on_and_are_the_same_again_for_the_same_seed() -> None:
    one, again = Prompts(seed=3), Prompts(seed=3)
    lengths = [1, 16, 256] * 20
    taken = [one.take(length) for length in lengths]
    assert taken == [again.take(length) for length in lengths]
    assert [len(prompt) for prompt in taken] == lengths
    assert all(before != after for before, after in pairwise(sorted(prompt[0] for prompt in taken)))
