"""Settings: one frozen dataclass a service, read once from flags and environment, checked on creation.

Each field is also a flag (`--drain-seconds 5`) and a variable (`TWOSTROKE_DRAIN_SECONDS=5`); a flag wins. Nested
settings are flat to the user. Unknown flags and TWOSTROKE_ variables are errors that name the nearest known one;
TWOSTROKE_CACHE is no setting but the same for all processes, and TWOSTROKE_API_KEY is a client's.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from twostroke.access.bearer import API_KEY_VARIABLE
from twostroke.folders import CACHE_VARIABLE

PREFIX = "TWOSTROKE_"
T = TypeVar("T")


class InvalidSetting(ValueError):
    """A setting is unknown, malformed or out of range."""

    def __init__(self, name: str, value: object, problem: str) -> None:
        super().__init__(f"--{name.replace('_', '-')} {value}: {problem}")
        self.problem = problem


def setting(default: Any = dataclasses.MISSING, *, help: str) -> Any:  # noqa: A002 - argparse's word
    """A dataclass field with a help text; without a default it must be given."""
    return dataclasses.field(default=default, metadata={"help": help})


_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(name: str, text: str) -> int:
    """Bytes from forms such as 1GiB, 512MiB or 1073741824. Raises InvalidSetting."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise InvalidSetting(name, text, "must be a size such as 1GiB, 512MiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].upper()])


class Parser(argparse.ArgumentParser):
    """Says what was probably meant."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **kwargs)

    def parse_known(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse all of `argv`; anything unknown ends the process with status 2."""
        known, unknown = self.parse_known_args(argv)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            self.error(unknown_name("option", unknown[0].partition("=")[0], flags))
        return known

    def error(self, message: str) -> NoReturn:
        """End the process with status 2 and one line."""
        self.exit(2, f"{self.prog}: {message}\n")


def load(
    kind: type[T], *, prog: str, argv: Sequence[str], environ: Mapping[str, str], description: str | None = None
) -> T:
    """Settings of this kind from flags and environment. Exits with status 2 and one line when they are wrong."""
    parser = Parser(prog=prog, description=description or kind.__doc__, argument_default=argparse.SUPPRESS)
    fields = {field.name: field for field in _leaves(kind)}
    for name, field in fields.items():
        _add_flag(parser, name, field)
    given = {name: value for name, value in vars(parser.parse_known(argv)).items() if name in fields}
    try:
        told = _from_environment(fields, environ)
        return _build(kind, told | given)
    except InvalidSetting as error:
        parser.error(str(error))


def unknown_name(what: str, name: str, known: Sequence[str]) -> str:
    """One line that says so, and what was probably meant."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown {what} {name}" + (f"; did you mean {near[0]}?" if near else "; see --help")


def _types(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _leaves(kind: type) -> Iterator[dataclasses.Field[Any]]:
    """All fields, nested settings flattened, each with its resolved type."""
    hints = _types(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _leaves(hints[field.name])
        else:
            field.type = hints[field.name]
            yield field


def _add_flag(parser: argparse.ArgumentParser, name: str, field: dataclasses.Field[Any]) -> None:
    flag, text = f"--{name.replace('_', '-')}", field.metadata.get("help", "")
    default = field.default
    if default not in (dataclasses.MISSING, None, "", ()):
        text += f" (default: {default.value if isinstance(default, Enum) else default})"
    if field.type is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        return

    def convert(raw: str) -> object:
        try:
            return _convert(name, field.type, raw)
        except InvalidSetting as error:
            raise argparse.ArgumentTypeError(f"{raw}: {error.problem}") from error

    parser.add_argument(flag, type=convert, help=text, metavar=name.rpartition("_")[2].upper())


def _from_environment(fields: Mapping[str, dataclasses.Field[Any]], environ: Mapping[str, str]) -> dict[str, object]:
    told: dict[str, object] = {}
    for variable, raw in environ.items():
        if not variable.startswith(PREFIX) or variable in (CACHE_VARIABLE, API_KEY_VARIABLE):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in fields:
            known = [PREFIX + each.upper() for each in fields]
            raise InvalidSetting(name, raw, unknown_name("variable", variable, known))
        told[name] = _convert(name, fields[name].type, raw)
    return told


def _convert(name: str, kind: Any, raw: str) -> object:
    if isinstance(kind, types.UnionType):  # X | None
        kind = next(each for each in typing.get_args(kind) if each is not type(None))
    if typing.get_origin(kind) is tuple:  # tuple[str, ...]: comma-separated
        return tuple(part.strip() for part in raw.split(",") if part.strip())
    if kind is bool:
        if raw.lower() in ("1", "true", "yes", "on"):
            return True
        if raw.lower() in ("0", "false", "no", "off"):
            return False
        raise InvalidSetting(name, raw, "must be true or false")
    if isinstance(kind, type) and issubclass(kind, Enum):
        choices = [str(each.value) for each in kind]
        if raw not in choices:
            raise InvalidSetting(name, raw, f"must be one of {', '.join(choices)}")
        return kind(raw)
    if kind is Path:
        return Path(raw).expanduser()
    try:
        return kind(raw)
    except ValueError:
        raise InvalidSetting(name, raw, f"must be {'a whole number' if kind is int else 'a number'}") from None


def _build(kind: type[T], values: Mapping[str, object]) -> T:
    arguments: dict[str, object] = {}
    hints = _types(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if dataclasses.is_dataclass(hints[field.name]):
            arguments[field.name] = _build(hints[field.name], values)
        elif field.name in values:
            arguments[field.name] = values[field.name]
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InvalidSetting(field.name, "", "must be given")
    return kind(**arguments)


def load_or_exit(kind: type[T], *, prog: str) -> T:
    """`load` from this process's own arguments and environment."""
    return load(kind, prog=prog, argv=sys.argv[1:], environ=os.environ)
