"""The log lines of one child: kept on disk within bounds, and read for what they say."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

MAX_FILE_BYTES = 8 << 20  # then the file becomes FILE.1, and the one before is gone
TAIL_LINES = 5
_HEADER = frozenset({"time", "level", "service", "event", "exception", "trace_id"})


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a child: a log record, or whatever else it wrote."""

    event: str
    level: str | None  # None: not a log record
    fields: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> Line:
        """Read a line; what is no log record is an event without level."""
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            return cls(text, None, {})
        if not isinstance(record, dict) or not isinstance(record.get("event"), str):
            return cls(text, None, {})
        fields = {key: value for key, value in record.items() if key not in _HEADER}
        return cls(record["event"], str(record.get("level", "info")), fields)

    @property
    def is_trouble(self) -> bool:
        """Whether somebody should know: a warning or worse."""
        return self.level in ("warning", "error", "critical")

    def __str__(self) -> str:
        told = ", ".join(f"{key} {value}" for key, value in self.fields.items())
        return f"{self.event} ({told})" if told else self.event


class Journal:
    """Appends lines to a file of at most MAX_FILE_BYTES, and remembers the last few."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tail: deque[Line] = deque(maxlen=TAIL_LINES)
        self._file = path.open("ab")
        self._size = self._file.tell()

    def add(self, raw: bytes) -> Line:
        """Keep one line, without its line end."""
        with contextlib.suppress(OSError):  # a full disk costs log lines, never the cluster
            self._write(raw + b"\n")
        line = Line.parse(raw.decode(errors="replace").rstrip())
        if line.event:
            self.tail.append(line)
        return line

    def last_words(self) -> Line:
        """What the child last said that tells why it ended: a traceback's last line, else its last complaint."""
        said = list(self.tail) or [Line("nothing was logged", None, {})]
        if said[-1].level is None:
            return said[-1]
        return ([line for line in said if line.is_trouble] or said)[-1]

    def _write(self, raw: bytes) -> None:
        if self._size + len(raw) > MAX_FILE_BYTES:
            self._turn()
        self._size += self._file.write(raw)
        self._file.flush()

    def _turn(self) -> None:
        self._file.close()
        self.path.replace(self.path.with_name(self.path.name + ".1"))
        self._file = self.path.open("wb")
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
