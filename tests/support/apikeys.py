"""Files of API keys, written as an operator would have them."""

from __future__ import annotations

from pathlib import Path

from twostroke.access.caller import Caller
from twostroke.access.keyfile import ApiKey, digest_of, entry, new_key
from twostroke.types import Priority


def tenant(name: str, namespace: str = "", highest: Priority = Priority.STANDARD) -> Caller:
    """A caller as a file has it."""
    return Caller(tenant=name, namespace=namespace or name, highest=highest)


def write_keys(path: Path, *callers: Caller) -> list[str]:
    """Write a file with a new key for each caller; returns the keys."""
    keys = [new_key() for _ in callers]
    entries = (entry(ApiKey(digest=digest_of(key), caller=caller)) for key, caller in zip(keys, callers, strict=True))
    path.write_text("\n".join(entries))
    return keys


def bearer(key: str) -> dict[str, str]:
    """The header that presents a key."""
    return {"authorization": f"Bearer {key}"}
