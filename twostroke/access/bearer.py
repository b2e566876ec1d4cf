"""The header `Authorization: Bearer KEY`, written and read: the same in HTTP and in the metadata of gRPC."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from twostroke.errors import InvalidRequest, Unauthenticated

API_KEY_VARIABLE = "TWOSTROKE_API_KEY"
HEADER = "authorization"

_KEY = r"[A-Za-z0-9._~+/-]{1,512}={0,2}"  # token68 of RFC 9110, bounded
_BEARER = re.compile(rf"Bearer +({_KEY})", re.IGNORECASE)


def authorization(api_key: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """What a client sends: the key given, else that of TWOSTROKE_API_KEY; nothing where that is empty.

    Raises: InvalidRequest, when the key cannot be one.
    """
    key = environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key
    if not key:
        return {}
    if not re.fullmatch(_KEY, key):
        raise InvalidRequest("the API key has characters that no key has", field="api_key")
    return {HEADER: f"Bearer {key}"}


def values_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> list[str]:
    """Every value of the header in gRPC metadata."""
    return [value for name, value in metadata or () if name == HEADER and isinstance(value, str)]


def presented(values: Sequence[str]) -> str:
    """The key in the header's only value. Raises Unauthenticated, without a word of what was sent."""
    if not values:
        raise Unauthenticated("no API key was sent")
    match = _BEARER.fullmatch(values[0]) if len(values) == 1 else None
    if match is None:
        raise Unauthenticated("the API key must come once, as Authorization: Bearer KEY")
    return match[1]
