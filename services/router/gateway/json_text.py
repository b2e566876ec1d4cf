"""JSON in and out of the door."""

from __future__ import annotations

import json
from typing import Any, NoReturn, TypeAlias

from twostroke.errors import InvalidRequest

Json: TypeAlias = dict[str, Any]

MAX_MEMBERS = 2_048  # of one object; the largest that means anything is logit_bias

# ASCII only: some stream readers split lines at U+2028 or U+0085, which JSON may hold unescaped.
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def encode(value: Json) -> bytes:
    """Compact JSON in one line of ASCII."""
    return _ENCODER.encode(value).encode("ascii")


def decode(body: bytes) -> Json:
    """Read a JSON object. A null member of any object counts as absent.

    Raises: InvalidRequest for anything but one object of strict JSON: other top-level values, text that is not UTF-8,
        members given twice or by the thousand, NaN and infinities, lone surrogates, nesting beyond the parser's stack.
    """
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_members, parse_constant=_constant)
        if b"\\u" in body:  # only an escape can smuggle in half of a surrogate pair, which has no UTF-8
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise InvalidRequest("the request body holds text that is not valid Unicode") from error
    except RecursionError as error:
        raise InvalidRequest("the request body is nested too deeply") from error
    except ValueError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the request body must be a JSON object")
    return value


def _members(pairs: list[tuple[str, object]]) -> Json:
    if len(pairs) > MAX_MEMBERS:
        raise ValueError(f"an object has more than {MAX_MEMBERS} members")
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("an object has the same member twice")
    return {name: value for name, value in members.items() if value is not None}


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
