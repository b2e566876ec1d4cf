"""JSON objects of a model folder, read with their types checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from twostroke.errors import ModelError

MAX_JSON_BYTES = 256 << 20


class Fields:
    """One JSON object; a key that is absent or null is the same as one that was never written.

    Raises:
        ModelError: from every look-up, when a value has another type, or is absent and has no default.
    """

    def __init__(self, where: str, values: Mapping[str, object]) -> None:
        self._where, self._values = where, values

    @classmethod
    def read(cls, path: Path) -> Fields:
        """Read the object in the file at `path`."""
        try:
            if path.stat().st_size > MAX_JSON_BYTES:
                raise ModelError(f"{path.name} is larger than {MAX_JSON_BYTES} bytes")
            values = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"cannot read {path.name}: {error}") from error
        if not isinstance(values, dict):
            raise ModelError(f"{path.name} does not hold a JSON object")
        return cls(path.name, values)

    @classmethod
    def read_if_present(cls, path: Path) -> Fields:
        """Read the object in the file at `path`; an absent file counts as an empty object."""
        return cls.read(path) if path.exists() else cls(path.name, {})

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def get(self, key: str) -> object:
        """Return the value as it is, or None."""
        return self._values.get(key)

    def items(self) -> Mapping[str, object]:
        """Return all keys and values."""
        return self._values

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number."""
        value = self._need(key, default)
        if type(value) is not int:
            raise self._wrong(key, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number."""
        value = self._need(key, default)
        if type(value) is not float and type(value) is not int:
            raise self._wrong(key, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self._wrong(key, "a number that a float can hold")
        return number

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return a truth value."""
        value = self._need(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._need(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; an absent one is empty."""
        value = self._values.get(key)
        listed = [] if value is None else value
        if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
            raise self._wrong(key, "a list of strings")
        return tuple(listed)

    def inner(self, key: str) -> Fields:
        """Return the object under `key`; an absent one is empty."""
        value = self._values.get(key) or {}
        if not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return Fields(f"{self._where}: {key}", value)

    def token_ids(self, key: str) -> frozenset[int]:
        """Return a token id or a list of them; an absent one is empty."""
        value = self._values.get(key)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(each) is int for each in listed):
            raise self._wrong(key, "token ids")
        return frozenset(listed)

    def _need(self, key: str, default: object) -> object:
        value = self._values.get(key)
        if value is None and default is None:
            raise ModelError(f"{self._where} does not say {key}")
        return default if value is None else value

    def _wrong(self, key: str, wanted: str) -> ModelError:
        return ModelError(f"{self._where}: {key} is not {wanted}")
