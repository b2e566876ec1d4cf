"""Bytes that are no sound HTTP: answered or cut off, and at most a line in the log."""

from __future__ import annotations

import asyncio
import logging
from urllib.parse import urlsplit

import pytest
from aiohttp.http_exceptions import BadHttpMessage

from services.router.gateway.malformed import QUIET_SECONDS, ConnectionLog
from tests.support.script import Scripted, hello, served

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
SECRET = b"Authorization: Bearer sesame\r\n"
MALFORMED = {
    "TLS": b"\x16\x03\x01\x00\x00garbage\r\n\r\n",
    "noise": b"sesame \xff\xfe\x00\r\n\r\n",
    "a large header": b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    "a header that is none": POST + b"Bearer sesame\r\n\r\n",
    "a negative length": POST + SECRET + b"Content-Length: -5\r\n\r\n",
    "two lengths": POST + SECRET + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    "a length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a chunk that is none": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nsesame",
    "a refused body with a chunk that is none": POST.replace(b"json", b"xml")
    + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
}


async def exchanged(url: str, sent: bytes) -> bytes:
    """All that comes back until the connection is closed."""
    reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
    try:
        writer.write(sent)
        writer.write_eof()
        async with asyncio.timeout(30):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED)
async def test_malformed_http_leaves_no_traceback_and_no_secret_in_the_log(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with served(Scripted(hello)) as url:
        for _ in range(3):
            answer = await exchanged(url, sent)
            assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), answer
    said = [record for record in caplog.records if record.name.startswith(("aiohttp", "services", "asyncio"))]
    assert len(said) <= 1
    for record in said:
        assert (record.levelno, record.exc_info) == (logging.INFO, None)
        assert "sesame" not in str(vars(record))


def test_lines_about_malformed_http_are_far_apart_and_count_what_they_leave_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    log = ConnectionLog(logging.getLogger("door"), lambda: now[0])
    with caplog.at_level(logging.INFO, logger="door"):
        for now[0] in (0.0, 1.0, QUIET_SECONDS - 1, QUIET_SECONDS + 1):
            log.exception("Error handling request", exc_info=BadHttpMessage("sesame"))
    assert [vars(record)["more_since_last"] for record in caplog.records] == [0, 2]


def test_a_defect_keeps_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    ConnectionLog(logging.getLogger("door")).exception("Unhandled exception", exc_info=KeyError("x"))
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info
