"""`twostroke keys new`: draw an API key, and write what the router has to know of it; `twostroke keys check FILE`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from twostroke.access.caller import Caller
from twostroke.access.keyfile import ApiKey, InvalidKeyFile, digest_of, entry, new_key, parse, read
from twostroke.cli.terminal import note, show, table
from twostroke.launcher.refusal import Refusal
from twostroke.settings import Parser
from twostroke.types import Priority

HEADER = ("TENANT", "NAMESPACE", "PRIORITY", "LABEL")


def run(argv: Sequence[str]) -> int:
    """Run the verb. Raises Refusal when a file or an entry is not sound; nothing was written then."""
    verbs = {"new": _new, "check": _check}
    if argv and argv[0] in verbs:
        return verbs[argv[0]](argv[1:])
    parser = Parser(prog="twostroke keys", description="Make API keys, or check a file of them.")
    parser.add_argument("verb", choices=list(verbs), help="each has a --help of its own")
    parser.parse_known(argv)
    return 0


def _new(argv: Sequence[str]) -> int:
    classes = [each.name.lower() for each in Priority]
    parser = Parser(
        prog="twostroke keys new",
        description="Print a new key on standard output. Nothing keeps it: --file gets its hash only.",
    )
    parser.add_argument("--tenant", required=True, help="on whose behalf its requests run")
    parser.add_argument("--namespace", help="who shares cached blocks with it; by default its tenant alone")
    parser.add_argument("--priority", choices=classes, default="standard", help="the highest class it may ask for")
    parser.add_argument("--label", default="", help="for people")
    parser.add_argument("--file", type=Path, help="append the entry here; absent: it goes to standard error")
    told = parser.parse_known(argv)
    key = new_key()
    caller = Caller(
        tenant=told.tenant, namespace=told.namespace or told.tenant, highest=Priority[told.priority.upper()]
    )
    text = entry(ApiKey(digest=digest_of(key), caller=caller, label=told.label))
    if told.file is None:
        _keys(text.encode(), "the entry")
        note(text.rstrip())
    else:
        _append(told.file, text)
        note(f"its entry was added to {told.file}")
    show(key)
    return 0


def _check(argv: Sequence[str]) -> int:
    parser = Parser(prog="twostroke keys check", description="Say what a file of API keys allows, or what is wrong.")
    parser.add_argument("file", type=Path, help="the file that the router gets as --api-keys")
    path = parser.parse_known(argv).file
    keys = _keys(_read(path), path)
    rows = [
        (key.caller.tenant, key.caller.namespace, key.caller.highest.name.lower(), key.label or "-") for key in keys
    ]
    show(table(HEADER, rows))
    return 0


def _append(path: Path, text: str) -> None:
    """Add an entry to a file that is sound, and still is with it, in one write."""
    before = _read(path) if path.exists() else b""
    gap = b"" if not before else b"\n" if before.endswith(b"\n") else b"\n\n"
    _keys(before + gap + text.encode(), path)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "wb", buffering=0) as file:
            file.write(gap + text.encode())
    except OSError as error:
        raise Refusal(f"cannot write to {path}: {error.strerror}", "name another file") from error


def _read(path: Path) -> bytes:
    try:
        return read(path)
    except InvalidKeyFile as error:
        raise Refusal(f"{path} {error}", "name a file of API keys") from error


def _keys(raw: bytes, name: object) -> tuple[ApiKey, ...]:
    try:
        return parse(raw)
    except InvalidKeyFile as error:
        raise Refusal(f"{name}: {error}", "mend what the message names") from error
