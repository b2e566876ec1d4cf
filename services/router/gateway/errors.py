"""Errors in the shape of the OpenAI API, with one field more: what to do about it."""

from __future__ import annotations

import logging
import math

from aiohttp import web

from services.router.gateway.json_text import Json
from twostroke.errors import Internal, InvalidRequest, NotFound, TooLarge, TwostrokeError, Unauthenticated

log = logging.getLogger(__name__)


class MethodNotAllowed(InvalidRequest):
    """The route exists, but not for this method."""

    http, reason = 405, "METHOD_NOT_ALLOWED"
    cure = "use a method named by the Allow header"


class BodyTooSlow(InvalidRequest):
    """The request body did not arrive in time."""

    http, reason = 408, "REQUEST_TIMEOUT"
    cure = "send the body faster, or send less"
    retryable = True


class UnsupportedMediaType(InvalidRequest):
    """The request body is not plain JSON."""

    http, reason = 415, "UNSUPPORTED_MEDIA_TYPE"
    cure = "send JSON with the header Content-Type: application/json, and without Content-Encoding"


def error_body(error: TwostrokeError) -> Json:
    """What a client gets to read, in a response body or as the last event of a stream."""
    return {
        "error": {
            "message": error.message,
            "type": _kind(error.http),
            "param": error.field,
            "code": error.reason.lower(),
            "cure": error.cure,
        }
    }


def error_headers(error: TwostrokeError) -> dict[str, str]:
    """Say whether and when to retry; x-should-retry is obeyed by the OpenAI clients."""
    headers = {"x-should-retry": "true" if error.retryable else "false"}
    if error.retryable:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after or 1)))
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def as_domain(error: Exception) -> TwostrokeError:
    """The domain error to answer with. A defect is logged here, and its text kept from the caller."""
    match error:
        case TwostrokeError():
            return error
        case web.HTTPException():
            return _from_http(error)
        case web.RequestPayloadError():
            return InvalidRequest(f"the request body is damaged: {error}")
        case _:
            log.error("request failed", exc_info=error)
            return Internal(f"{type(error).__name__} in the HTTP door")


def _from_http(error: web.HTTPException) -> TwostrokeError:
    match error.status:
        case 404:
            return NotFound("no such route; the API is under /v1, health under /health")
        case 405:
            return MethodNotAllowed("this route does not answer that method")
        case 413:
            return TooLarge("the request body is larger than this server accepts")
        case status if status < 500:
            return InvalidRequest(f"the request was refused: {error.reason}")
        case _:
            return Internal(f"the server failed: {error.reason}")


def _kind(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
