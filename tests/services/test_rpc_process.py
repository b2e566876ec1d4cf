"""How a service process is told to stop, and the code it ends with."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from twostroke.errors import Overloaded, Unavailable
from twostroke.rpc.process import exit_code
from twostroke.settings import InvalidSetting

STOPPING = """
import asyncio, sys
from twostroke.rpc.server import ServerSettings, told_to_stop

async def main():
    told = asyncio.create_task(told_to_stop(ServerSettings(stop_with_stdin="stdin" in sys.argv)))
    await asyncio.sleep(0)
    print("listening", flush=True)
    await told
    print("told", flush=True)
    if "drain" in sys.argv:
        await asyncio.Event().wait()

asyncio.run(main())
"""


def started(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPING, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_begins_the_drain_and_a_second_one_ends_the_process_at_once(number: signal.Signals) -> None:
    with started("drain") as process:
        process.send_signal(number)
        assert process.stdout is not None
        assert process.stdout.readline() == "told\n"
        process.send_signal(number)
        assert process.wait(timeout=30) == 128 + number


def test_a_closed_standard_input_begins_the_drain_where_that_is_asked_for() -> None:
    with started("stdin") as process:
        assert process.stdin is not None
        process.stdin.write("words are ignored\n")
        process.stdin.close()
        assert process.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (InvalidSetting("listen", "8000", "must be host:port"), 2),
        (Overloaded("full"), 1),
        (ExceptionGroup("", [ExceptionGroup("", [Unavailable("gone")])]), 1),
    ],
)
def test_a_process_ends_with_a_code_that_says_why(error: BaseException, code: int) -> None:
    assert exit_code(failing(error)) == code
    assert exit_code(lambda: None) == 0


def test_a_defect_ends_a_process_with_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        exit_code(failing(ZeroDivisionError()))


def failing(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run
