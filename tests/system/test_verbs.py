"""Every verb of the command line, against a running cluster."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.launched import ROOT, Launched, launched

SECONDS = 60.0
QUESTION = "What is the capital of France?"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Launched]:
    async with launched(tmp_path) as running:
        await running.ready()
        yield running


def doors(cluster: Launched) -> tuple[str, str]:
    """HTTP and gRPC addresses, from the ready line."""
    words = next(line for line in cluster.lines if line.startswith("ready ")).split()
    return words[1], words[words.index("gRPC") + 1].rstrip(",")


async def start(*argv: str) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "twostroke", *argv), stdin=PIPE, stdout=PIPE, stderr=PIPE, cwd=ROOT, env=os.environ
    )


async def run(*argv: str, told: str = "") -> tuple[int | None, str, str]:
    """Status, standard output and standard error of one command."""
    process = await start(*argv)
    async with asyncio.timeout(SECONDS):
        out, err = await process.communicate(told.encode())
    return process.returncode, out.decode(errors="replace"), err.decode()


async def test_each_verb_puts_data_on_standard_output(cluster: Launched) -> None:
    http, grpc = doors(cluster)

    status, out, err = await run("status", "--address", grpc)
    assert (status, err) == (0, "ready\n")
    assert [line.split()[1] for line in out.splitlines()] == ["ROLE", "prefill", "decode"]

    status, out, _ = await run("models", "--address", grpc)
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == ["MODEL", "tiny"]

    status, out, _ = await run("probe", grpc)
    assert (status, out) == (0, "SERVING\n")

    status, out, err = await run("generate", "Once upon", "--max-tokens", "8", "--seed", "3", "--address", grpc)
    assert status == 0
    assert "prompt 9 tokens (0 cached), answer" in err
    assert "seed 3" in err
    status, again, _ = await run("generate", "-", "--max-tokens", "8", "--address", grpc, told="Once upon")
    assert (status, again) == (0, out)

    over_grpc = await run("chat", QUESTION, "--max-tokens", "8", "--address", grpc)
    over_http = await run("chat", QUESTION, "--max-tokens", "8", "--address", http)
    assert over_grpc == over_http
    assert over_grpc[0] == 0
    assert over_grpc[2] == ""


async def test_errors_come_with_a_cure_through_both_doors(cluster: Launched) -> None:
    for address in doors(cluster):
        status, out, err = await run("chat", QUESTION, "--temperature", "3", "--address", address)
        assert (status, out) == (1, "")
        assert err.splitlines() == [
            "twostroke: temperature must be from 0 to 2, not 3",
            "  try: change what the message names",
        ]


async def test_a_conversation_goes_on_until_the_user_leaves(cluster: Launched) -> None:
    _, grpc = doors(cluster)
    said = "Hello\n\nAnd again\n/exit\nnever asked\n"
    status, out, err = await run("chat", "--max-tokens", "4", "--address", grpc, told=said)
    assert status == 0
    assert out.count("> ") == 4  # two questions, an empty line, and the way out
    assert "Ctrl-C" in err


async def test_ctrl_c_stops_the_answer_and_not_the_conversation(cluster: Launched) -> None:
    _, grpc = doors(cluster)
    chat = await start("chat", "--address", grpc, "--max-tokens", "1500")
    assert chat.stdin is not None
    assert chat.stdout is not None
    chat.stdin.write(f"{QUESTION}\n".encode())  # to which the tiny model has much to say
    async with asyncio.timeout(SECONDS):
        await chat.stdout.readexactly(len("> ") + 1)  # the prompt, and the start of the answer
        chat.send_signal(signal.SIGINT)
        await chat.stdout.readuntil(b" [stopped]\n")
        out, err = await chat.communicate(b"/exit\n")
    assert (chat.returncode, out.count(b"> ")) == (0, 1), err


async def test_a_cluster_with_keys_answers_who_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = str(tmp_path / "keys.toml")
    _, drawn, _ = await run("keys", "new", "--tenant", "search", "--file", keys)
    async with launched(tmp_path, "--api-keys", keys) as cluster:
        await cluster.ready()
        _, grpc = doors(cluster)
        assert (await run("probe", grpc))[:2] == (0, "SERVING\n")
        for address in doors(cluster):
            status, out, err = await run("chat", QUESTION, "--address", address)
            assert (status, out, err.splitlines()[0]) == (1, "", "twostroke: no API key was sent")
        monkeypatch.setenv("TWOSTROKE_API_KEY", drawn.strip())
        for address in doors(cluster):
            assert (await run("chat", QUESTION, "--max-tokens", "2", "--address", address))[0] == 0
        for verb in ("status", "models"):
            assert (await run(verb, "--address", grpc))[0] == 0
            assert (await run(verb, "--address", grpc, "--api-key", "ts-wrong"))[0] == 1
        assert (await run("generate", "Once", "--max-tokens", "2", "--address", grpc))[0] == 0
    assert drawn.strip() not in "".join(path.read_text() for path in (tmp_path / "state").rglob("*.log"))
