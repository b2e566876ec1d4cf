"""The usage log, held against what callers saw: each request is counted once."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.faults.soak.callers import Seen

Record = dict[str, Any]
# What the client tries again: nothing was generated, and nothing is charged.
REFUSED = ("unavailable", "worker_lost", "overloaded")


class Bills:
    """Reads what was appended since the last look."""

    def __init__(self, ledger: Path) -> None:
        self._ledger = ledger
        self._read = 0  # bytes
        self.records = 0

    def wrong(self, seen: dict[str, Seen]) -> list[str]:
        """What is wrong with the bills of these requests, which must be all that were asked since the last look."""
        by_name = defaultdict[str, list[Record]](list)
        for record in self._new():
            by_name[record["request_id"]].append(record)
        found = [f"{name} was billed, and never asked" for name in by_name.keys() - seen.keys()]
        for name, each in seen.items():
            if (problem := _problem(each, by_name[name])) is not None:
                found.append(f"{name}, {each}: {problem}: {by_name[name]}")
        return found

    def _new(self) -> list[Record]:
        with self._ledger.open("rb") as file:
            file.seek(self._read)
            lines = file.readlines()
        self._read += sum(map(len, lines))
        self.records += len(lines)
        return [json.loads(line) for line in lines]


def _problem(seen: Seen, records: list[Record]) -> str | None:
    counted = [record for record in records if record["outcome"] not in REFUSED]
    if any(record["completion_tokens"] for record in records if record not in counted):
        return "a refusal has tokens"
    if len(counted) > 1:
        return "counted more than once"
    if not counted:
        return "not counted" if seen.begun else None
    (record,) = counted
    if seen.outcome == "complete":
        mine, theirs = ("completed", seen.prompt_tokens, seen.tokens), ("outcome", "prompt_tokens", "completion_tokens")
        return None if mine == tuple(record[name] for name in theirs) else "counted wrong"
    return "counted less than was told" if record["completion_tokens"] < seen.tokens else None
