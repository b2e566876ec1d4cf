"""What a request says besides its route: body, id, time limit."""

from __future__ import annotations

import asyncio
import math
import re

from aiohttp import web

from services.router.gateway.errors import BodyTooSlow, UnsupportedMediaType
from services.router.gateway.settings import MAX_REQUEST_SECONDS
from twostroke.errors import InvalidRequest
from twostroke.wire.generate import new_request_id

REQUEST_ID_HEADER = "x-request-id"
TIMEOUT_HEADER = "x-request-timeout"

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,96}")  # shorter than any limit further in: prompts append their number


def request_id(http: web.Request) -> str:
    """The caller's id when it is usable, else a new one."""
    given = http.headers.get(REQUEST_ID_HEADER, "")
    return given if _REQUEST_ID.fullmatch(given) else new_request_id()


def request_seconds(http: web.Request, default: float) -> float:
    """The time limit of the request. Raises InvalidRequest naming the header."""
    given = http.headers.get(TIMEOUT_HEADER)
    if given is None:
        return default
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_REQUEST_SECONDS:
        raise InvalidRequest(
            f"{TIMEOUT_HEADER} must be seconds, over 0 to {MAX_REQUEST_SECONDS:g}", field=TIMEOUT_HEADER
        )
    return seconds


async def read_body(http: web.Request, seconds: float) -> bytes:
    """A JSON body, read within `seconds`; the application bounds its size.

    Raises: UnsupportedMediaType, BodyTooSlow; HTTPRequestEntityTooLarge from the library.
    """
    if http.content_type != "application/json":
        raise UnsupportedMediaType(f"the request body is {http.content_type}")
    if http.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("the request body is encoded, which the header Content-Encoding says")
    try:
        async with asyncio.timeout(seconds):
            return await http.read()
    except TimeoutError:
        raise BodyTooSlow(f"the request body did not arrive within {seconds:g} s") from None
