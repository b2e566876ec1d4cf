"""The file of API keys: TOML, a table a key, and of a key only its SHA-256.

    [[key]]
    sha256 = "b1946ac9..."  # of the key; 64 hexadecimal digits
    tenant = "search"
    namespace = "public"    # optional: who shares cached blocks; by default the tenant alone
    priority = "batch"      # optional: the highest class it may ask for; by default standard
    label = "crawler"       # optional: for people

Keys are drawn here, from 256 random bits. That is why one fast hash is right: slow, salted hashes protect secrets that
can be guessed, and these cannot be.
"""

from __future__ import annotations

import json
import re
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from twostroke.access.caller import Caller
from twostroke.types import Priority

MAX_KEYS = 10_000
MAX_FILE_BYTES = 4 << 20
MAX_LABEL_CHARACTERS = 128
KEY_BYTES = 32  # random, of a new key
PREFIX = "ts-"  # lets people, and scanners of repositories, see what it is

_FIELDS = frozenset({"sha256", "tenant", "namespace", "priority", "label"})
_PLACE = re.compile(r"\(at [a-z0-9 ,]+\)|in position \d+")  # in messages of tomllib, and of decoding
_HEADER = re.compile(r"\s*\[\[\s*key\s*\]\]")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PRIORITIES = {each.name.lower(): each for each in Priority}
_SHOWN_CHARACTERS = 24  # of an unknown field's name: shorter than a key or a hash that was put in the wrong place


class InvalidKeyFile(ValueError):
    """The file cannot be used as it is; the text says where and why, and holds no key and no hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key of the file."""

    digest: bytes = field(repr=False)  # SHA-256 of the key, 32 bytes
    caller: Caller
    label: str = ""


def digest_of(key: str) -> bytes:
    """What the file holds of a key: 32 bytes."""
    return sha256(key.encode()).digest()


def new_key() -> str:
    """A key that nobody can guess."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def entry(key: ApiKey) -> str:
    """The table of a key, as the file has it."""
    told = {
        "sha256": key.digest.hex(),
        "tenant": key.caller.tenant,
        # Said only where it differs: who copies an entry for another tenant must not share cached blocks by accident.
        "namespace": key.caller.namespace if key.caller.namespace != key.caller.tenant else "",
        "priority": key.caller.highest.name.lower(),
        "label": key.label,
    }
    # Of what a name or a label may hold, JSON's strings are TOML's.
    lines = (f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in told.items() if value)
    return "[[key]]\n" + "".join(lines)


def read(path: Path) -> bytes:
    """The file as it is. Raises InvalidKeyFile when it cannot be read or is too large."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidKeyFile(f"cannot be read: {error.strerror}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise InvalidKeyFile(f"has more than {MAX_FILE_BYTES >> 20} MiB")
    return raw


def parse(raw: bytes) -> tuple[ApiKey, ...]:
    """The keys of a file, in its order. Raises InvalidKeyFile naming the key and the field."""
    try:
        text = raw.decode()
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # Where, but not what: parsers quote what they could not read, and that may be a key.
        place = _PLACE.search(str(error))
        raise InvalidKeyFile(f"is not TOML{f' {place[0]}' if place else ''}") from None
    _known(document, frozenset({"key"}), "the file")
    tables = document.get("key", [])
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise InvalidKeyFile("key must be tables: each begins with [[key]]")
    if not 1 <= len(tables) <= MAX_KEYS:
        raise InvalidKeyFile(f"has {len(tables)} keys; it must have from 1 to {MAX_KEYS}, each under [[key]]")
    headers = [at for at, line in enumerate(text.splitlines(), start=1) if _HEADER.match(line)]
    lines = [f" (line {at})" for at in headers] if len(headers) == len(tables) else [""] * len(tables)
    names = [f"key {number}{line}" for number, line in enumerate(lines, start=1)]
    keys: dict[bytes, ApiKey] = {}
    for where, table in zip(names, tables, strict=True):
        key = _key(table, where)
        if key.digest in keys:
            raise InvalidKeyFile(f"{where}: sha256 is that of {names[list(keys).index(key.digest)]} too")
        keys[key.digest] = key
    return tuple(keys.values())


def _key(table: Mapping[str, Any], where: str) -> ApiKey:
    _known(table, _FIELDS, where)
    digest = _matching(table, "sha256", _DIGEST, where, "64 hexadecimal digits, as `twostroke keys new` writes them")
    named = "1 to 64 letters, digits, '.', '_' and '-', the first a letter or a digit"
    tenant = _matching(table, "tenant", _NAME, where, named)
    namespace = _matching({"namespace": tenant, **table}, "namespace", _NAME, where, named)
    priority = table.get("priority", "standard")
    if not isinstance(priority, str) or priority not in _PRIORITIES:
        raise InvalidKeyFile(f"{where}: priority must be one of {', '.join(_PRIORITIES)}")
    label = table.get("label", "")
    if not isinstance(label, str) or not label.isprintable() or len(label) > MAX_LABEL_CHARACTERS:
        raise InvalidKeyFile(f"{where}: label must be at most {MAX_LABEL_CHARACTERS} printable characters")
    caller = Caller(tenant=tenant, namespace=namespace, highest=_PRIORITIES[priority])
    return ApiKey(digest=bytes.fromhex(digest), caller=caller, label=label)


def _matching(table: Mapping[str, Any], name: str, shape: re.Pattern[str], where: str, must: str) -> str:
    value = table.get(name)
    if not isinstance(value, str) or not shape.fullmatch(value):
        raise InvalidKeyFile(f"{where}: {name} must be {must}")
    return value


def _known(table: Mapping[str, Any], fields: frozenset[str], where: str) -> None:
    for name in table:
        if name not in fields:
            shown = name if len(name) <= _SHOWN_CHARACTERS else "with a long name"
            raise InvalidKeyFile(f"{where}: unknown field {shown}; there are {', '.join(sorted(fields))}")
