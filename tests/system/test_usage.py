"""One usage record per request, at every end it can have."""

from __future__ import annotations

import json
from contextlib import aclosing
from pathlib import Path

import pytest

from tests.support.cluster import Shape, started, tiny_model
from twostroke.errors import ContextTooLong, DeadlineExceeded
from twostroke.types import Delta

RECORD_FIELDS = {"outcome", "prompt_tokens", "completion_tokens", "cached_local", "cached_store", "finish_reasons"}


async def test_every_request_leaves_exactly_one_record(tmp_path: Path) -> None:
    ledger = tmp_path / "usage.jsonl"
    async with started(Shape(model=tiny_model(tmp_path / "model"), usage_log=ledger)) as cluster:
        client = cluster.client
        length = await client.complete("abc", max_tokens=5, ignore_eos=True, request_id="length")
        await client.complete("abc", max_tokens=50, logit_bias={258: 100.0}, request_id="stop")
        async with aclosing(client.generate("abc", max_tokens=2_000, ignore_eos=True, request_id="left")) as events:
            async for event in events:
                if isinstance(event, Delta) and event.total_tokens >= 3:
                    break
        with pytest.raises(DeadlineExceeded):
            await client.complete("abc", max_tokens=4_000, ignore_eos=True, timeout=0.2, request_id="late")
        with pytest.raises(ContextTooLong):
            await client.complete(tuple([1] * 4_096), request_id="long")
        await cluster.settled()
    records = {}
    for line in ledger.read_text().splitlines():
        record = json.loads(line)
        assert record["request_id"] not in records
        assert record.keys() >= RECORD_FIELDS
        records[record["request_id"]] = record
    assert records["length"]["outcome"] == "completed"
    assert records["length"]["finish_reasons"] == ["length"]
    assert records["length"]["completion_tokens"] == length.usage.completion_tokens == 5
    assert records["stop"]["finish_reasons"] == ["stop"]
    assert records["stop"]["completion_tokens"] == 1
    assert records["left"]["outcome"] == "cancelled"
    assert records["left"]["completion_tokens"] >= 3
    assert records["late"]["outcome"] in ("cancelled", "deadline_exceeded")
    assert records["late"]["completion_tokens"] > 0
    assert records["long"]["outcome"] == "context_length_exceeded"
    assert records["long"]["completion_tokens"] == 0


async def test_several_choices_count_the_prompt_once(tmp_path: Path) -> None:
    async with started(Shape(model=tiny_model(tmp_path / "model"))) as cluster:
        events = [each async for each in cluster.client.generate("abcd", n=3, max_tokens=6, ignore_eos=True)]
        usage = events[-1]
        assert usage.prompt_tokens == 4
        assert usage.completion_tokens == 18
