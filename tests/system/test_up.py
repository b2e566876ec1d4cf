"""`twostroke up` as a user meets it: it answers, it mends what breaks, and it leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest

from tests.support.launched import Launched, gone, launched

QUESTION = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 8,
    "temperature": 0,
}


async def ask(http: str, **more: object) -> str:
    async with (
        aiohttp.ClientSession(http) as session,
        session.post("/v1/chat/completions", json=QUESTION | more) as response,
    ):
        body = await response.json()
        assert response.status == 200, body
        return str(body["choices"][0]["message"]["content"])


async def assert_nothing_left(cluster: Launched, children: dict[str, int]) -> None:
    for pid in children.values():
        await gone(pid)
    assert cluster.arenas() == []


async def test_it_says_ready_answers_and_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    async with launched(tmp_path) as cluster:
        http = await cluster.ready()
        children = cluster.children()
        assert set(children) == {f"services.{name}" for name in ("kvstore", "prefill", "decode", "router")}
        assert cluster.arenas()
        first = await ask(http, ignore_eos=True)
        assert first
        assert await ask(http, ignore_eos=True) == first
        cluster.process.send_signal(signal.SIGINT)
        assert await cluster.ended() == 0
        await assert_nothing_left(cluster, children)


def session_niceness(pid: int) -> int | None:
    """The niceness of a process's session; None where sessions are not scheduled as groups."""
    file = Path(f"/proc/{pid}/autogroup")
    return int(file.read_text().split()[-1]) if file.exists() else None


async def test_workers_and_their_sessions_are_nicer_than_router_store_and_launcher(tmp_path: Path) -> None:
    async with launched(tmp_path) as cluster:
        await cluster.ready()
        ours = os.getpriority(os.PRIO_PROCESS, 0)
        for name, pid in cluster.children().items():
            worker = name in ("services.prefill", "services.decode")
            assert os.getpriority(os.PRIO_PROCESS, pid) == ours + (5 if worker else 0)
            async with asyncio.timeout(20):
                while session_niceness(pid) not in (ours + 5 if worker else 0, None):
                    await asyncio.sleep(0.05)  # Linux lets one session change in a tenth of a second


async def test_more_workers_answer_too(tmp_path: Path) -> None:
    async with launched(tmp_path, "--prefill", "2", "--decode", "2") as cluster:
        http = await cluster.ready()
        assert any("2 prefill, 2 decode" in line for line in cluster.lines)
        assert await ask(http, ignore_eos=True)


async def test_when_the_launcher_is_killed_its_children_end(tmp_path: Path) -> None:
    async with launched(tmp_path) as cluster:
        await cluster.ready()
        children = cluster.children()
        cluster.process.kill()
        await assert_nothing_left(cluster, children)
    async with launched(tmp_path) as cluster:
        assert await ask(await cluster.ready(), ignore_eos=True)


async def test_what_a_killed_store_left_behind_is_removed_by_the_next_one(tmp_path: Path) -> None:
    async with launched(tmp_path) as cluster:
        await cluster.ready()
        left = cluster.arenas()
        children = cluster.children()
        cluster.process.kill()
        store = children["services.kvstore"]
        os.kill(store, signal.SIGKILL)
        for pid in children.values():
            await gone(pid)
    async with launched(tmp_path) as cluster:
        await cluster.ready()
        assert not set(left) & set(cluster.arenas())


@pytest.mark.parametrize("service", ["services.decode", "services.prefill", "services.kvstore", "services.router"])
async def test_a_child_that_is_killed_is_reported_and_started_again(tmp_path: Path, service: str) -> None:
    async with launched(tmp_path) as cluster:
        http = await cluster.ready()
        before = cluster.children()[service]
        os.kill(before, signal.SIGKILL)
        name = service.removeprefix("services.")
        reported = await cluster.until("was killed by SIGKILL")
        assert name in reported
        await cluster.until(f"{name}" + ("" if name in ("kvstore", "router") else "-1") + " serves at")
        assert cluster.children()[service] != before
        if service == "services.router":
            await cluster.until("ready again")
        assert await eventually_answers(http)


async def eventually_answers(http: str) -> str:
    """Ask until the router has seen the new process: it says 503 with a time to wait before."""
    async with asyncio.timeout(30), aiohttp.ClientSession(http) as session:
        while True:
            async with session.post("/v1/chat/completions", json=QUESTION | {"ignore_eos": True}) as response:
                if response.status == 200:
                    return str((await response.json())["choices"][0]["message"]["content"])
                assert response.status == 503, await response.text()
                await asyncio.sleep(float(response.headers["retry-after"]))


async def test_a_second_ctrl_c_ends_everything_at_once(tmp_path: Path) -> None:
    async with launched(tmp_path) as cluster:
        http = await cluster.ready()
        children = cluster.children()
        async with aiohttp.ClientSession(http) as session:
            body = QUESTION | {"ignore_eos": True, "max_tokens": None, "n": 16, "stream": True}
            async with session.post("/v1/chat/completions", json=body) as stream:
                assert stream.status == 200
                await stream.content.readline()  # an answer is open, which a drain would wait for
                cluster.process.send_signal(signal.SIGINT)
                await cluster.until("again to stop at once")
                cluster.process.send_signal(signal.SIGINT)
                assert await cluster.ended() == 130
        for pid in children.values():
            await gone(pid)


async def test_a_service_that_cannot_run_as_told_ends_the_launcher_with_its_reason(tmp_path: Path) -> None:
    async with launched(tmp_path, "--kv-bytes", "1") as cluster:
        assert await cluster.ended() == 2
        assert any("one page takes" in line for line in cluster.lines), cluster.lines
        assert cluster.arenas() == []
