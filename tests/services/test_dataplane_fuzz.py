"""The data plane against anybody: whatever bytes come, a connection ends in a refusal or is closed; no other minds."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.peers import asked, sourcing
from tests.support.stores import WAIT_SECONDS
from twostroke.kv.transport import frames
from twostroke.kv.transport.frames import Code, Status


@dataclass
class Victim:
    """A data plane in a thread, with a request that it answers."""

    address: tuple[str, int] = ("", 0)
    request: bytes = field(default=b"", repr=False)
    answer: bytes = field(default=b"", repr=False)

    def connect(self) -> socket.socket:
        connection = socket.create_connection(self.address, timeout=WAIT_SECONDS)
        assert Status.unpack(connection.recv(frames.STATUS_BYTES)).code is Code.OK
        return connection

    def said_to(self, data: bytes) -> bytes:
        """All that is answered to `data` and an end."""
        said = b""
        with self.connect() as connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while more := connection.recv(1 << 16):
                    said += more
            except ConnectionError:  # closed before all was read
                pass
        return said


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    made, ready, done = Victim(), threading.Event(), threading.Event()

    async def serve(folder: Path) -> None:
        async with sourcing(folder, connections=4) as source:
            host, _, port = source.plane.offer.address.decode().rpartition(":")
            made.address, made.request = (host, int(port)), asked(*source.holding(1, 2))
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve(tmp_path_factory.mktemp("arena"))))
    thread.start()
    assert ready.wait(WAIT_SECONDS)
    made.answer = made.said_to(made.request)
    yield made
    done.set()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


CHANGES = st.lists(st.tuples(st.integers(0, 1 << 10), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4)


def is_refusal(said: bytes) -> bool:
    return len(said) == frames.STATUS_BYTES and Status.unpack(said).code is not Code.OK


@given(data=st.binary(max_size=400))
def test_random_bytes_end_in_a_refusal_or_a_close(victim: Victim, data: bytes) -> None:
    said = victim.said_to(data)
    assert said == b"" or is_refusal(said)


@given(changes=CHANGES, cut=st.none() | st.integers(0, 200))
def test_a_request_that_was_meddled_with_is_refused_or_answered_as_it_was(
    victim: Victim, changes: list[tuple[int, bytes]], cut: int | None
) -> None:
    data = bytearray(victim.request)
    for at, put in changes:
        data[at % len(data) : at % len(data) + len(put)] = put
    said = victim.said_to(bytes(data[:cut]))
    assert said == b"" or is_refusal(said) or said.startswith(victim.answer[: frames.STATUS_BYTES])
    if said[: frames.STATUS_BYTES] == victim.answer[: frames.STATUS_BYTES]:
        block = len(victim.answer) // 2  # one of the two may have been named wrongly
        assert said[: block - frames.TRAILER_BYTES] == victim.answer[: block - frames.TRAILER_BYTES]


@given(parts=st.lists(st.integers(1, 100), max_size=8))
def test_a_request_may_come_in_any_pieces(victim: Victim, parts: list[int]) -> None:
    left = victim.request
    with victim.connect() as connection:
        for part in parts:
            connection.sendall(left[:part])
            left = left[part:]
        connection.sendall(left)
        with connection.makefile("rb") as said:
            assert said.read(len(victim.answer)) == victim.answer


def test_after_all_that_it_serves_as_before_and_has_logged_no_failure(
    victim: Victim, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert victim.said_to(b"x" * frames.HEAD_BYTES)
        assert victim.said_to(victim.request) == victim.answer
    assert not caplog.records
