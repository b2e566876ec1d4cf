"""The soak is itself judged: it must see what it looks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.soak.bills import Bills
from tests.faults.soak.callers import Seen
from tests.faults.soak.holdings import Course, Held
from tests.faults.soak.mix import Mix
from tests.support.processes import Service

COMPLETE = Seen("complete", True, 5, 10)
LEFT = Seen("left", True, 3, 10)


def record(outcome: str, tokens: int, name: str = "a") -> dict[str, Any]:
    return {"request_id": name, "outcome": outcome, "prompt_tokens": 10, "completion_tokens": tokens}


def wrong(folder: Path, seen: Seen, *records: dict[str, Any]) -> list[str]:
    ledger = folder / "usage.jsonl"
    ledger.write_text("".join(json.dumps(each) + "\n" for each in records))
    return Bills(ledger).wrong({"a": seen})


@pytest.mark.parametrize(
    ("seen", "records"),
    [
        (COMPLETE, [record("completed", 5)]),
        (COMPLETE, [record("unavailable", 0), record("completed", 5)]),
        (LEFT, [record("cancelled", 4)]),
        (LEFT, [record("completed", 5)]),
        (Seen("expired", False, 0, 10), []),
        (Seen("expired", False, 0, 10), [record("deadline_exceeded", 0)]),
    ],
)
def test_a_request_that_is_counted_once_is_right(tmp_path: Path, seen: Seen, records: list[dict[str, Any]]) -> None:
    assert wrong(tmp_path, seen, *records) == []


@pytest.mark.parametrize(
    ("seen", "records", "problem"),
    [
        (COMPLETE, [], "not counted"),
        (LEFT, [], "not counted"),
        (COMPLETE, [record("completed", 5)] * 2, "more than once"),
        (LEFT, [record("cancelled", 3), record("completed", 5)], "more than once"),
        (COMPLETE, [record("completed", 6)], "counted wrong"),
        (COMPLETE, [record("cancelled", 5)], "counted wrong"),
        (LEFT, [record("cancelled", 2)], "less than was told"),
        (COMPLETE, [record("unavailable", 2), record("completed", 5)], "a refusal has tokens"),
        (COMPLETE, [record("completed", 5), record("completed", 5, "b")], "never asked"),
    ],
)
def test_any_other_count_is_wrong(tmp_path: Path, seen: Seen, records: list[dict[str, Any]], problem: str) -> None:
    (found,) = wrong(tmp_path, seen, *records)
    assert problem in found


def test_bills_are_read_once(tmp_path: Path) -> None:
    ledger = tmp_path / "usage.jsonl"
    bills = Bills(ledger)
    for _ in range(2):
        with ledger.open("a") as file:
            file.write(json.dumps(record("completed", 5)) + "\n")
        assert bills.wrong({"a": COMPLETE}) == []
    assert bills.records == 2


def test_what_grows_is_seen() -> None:
    base = Held(descriptors=20, memory=100 << 20)
    course = Course(Service("router"), "router", base, Held(descriptors=22, memory=105 << 20))
    assert course.wrong() == []
    course.now = Held(descriptors=23, memory=106 << 20)
    assert [each.partition(" of")[0] for each in course.wrong()] == ["memory", "descriptors"]


def test_the_same_seed_asks_the_same() -> None:
    first, again, other = ([mix.draw() for _ in range(200)] for mix in (Mix(1), Mix(1), Mix(2)))
    assert first == again
    assert first != other
    assert len({each.name for each in first}) == 200
    assert {each.question.n for each in first} == {1, 2}
    assert any(each.recurs for each in first)
