"""One record a request, whatever became of it."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from services.router.accounting import Account, Ledger
from services.router.metrics import Metrics
from twostroke.errors import BlocksMissing, DeadlineExceeded, Overloaded
from twostroke.types import CachedTokens, GenerateRequest, RequestContext, SamplingParams


def request(name: str = "r-1") -> GenerateRequest:
    context = RequestContext(request_id=name, tenant="acme", session="s-7")
    return GenerateRequest(context=context, prompt="never written down", sampling=SamplingParams(seed=9), n=2)


def used(account: Account) -> None:
    account.model, account.prompt_tokens, account.completion_tokens = "tiny", 40, 6
    account.cached, account.attempts, account.finish = CachedTokens(local=16, store=8), 3, ["stop", "length"]
    account.note_token()


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_record_says_who_used_what_and_nothing_of_the_prompt(tmp_path: Path) -> None:
    path, metrics = tmp_path / "usage.jsonl", Metrics()
    with Ledger.opened(path, metrics) as ledger, ledger.account(request()) as account:
        used(account)
    (record,) = records(path)
    assert record | {"time": "", "seconds": 0, "first_token_seconds": 0} == {
        "time": "",
        "request_id": "r-1",
        "tenant": "acme",
        "session": "s-7",
        "model": "tiny",
        "outcome": "completed",
        "finish_reasons": ["stop", "length"],
        "prompt_tokens": 40,
        "completion_tokens": 6,
        "cached_local": 16,
        "cached_store": 8,
        "choices": 2,
        "attempts": 3,
        "seed": 9,
        "first_token_seconds": 0,
        "seconds": 0,
    }
    assert "never written" not in path.read_text()


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Overloaded("full"), "overloaded"),
        (DeadlineExceeded("late"), "deadline_exceeded"),
        (BlocksMissing("gone"), "kv_blocks_missing"),
        (RuntimeError("a defect"), "internal"),
        (asyncio.CancelledError(), "cancelled"),
        (GeneratorExit(), "cancelled"),
    ],
)
def test_every_other_end_is_recorded_once_with_what_was_used(
    tmp_path: Path, error: BaseException, outcome: str
) -> None:
    path, metrics = tmp_path / "usage.jsonl", Metrics()

    def end(ledger: Ledger) -> None:
        with ledger.account(request()) as account:
            used(account)
            raise error

    with Ledger.opened(path, metrics) as ledger, pytest.raises(type(error)):
        end(ledger)
    (record,) = records(path)
    assert (record["outcome"], record["prompt_tokens"], record["completion_tokens"]) == (outcome, 40, 6)
    assert f'twostroke_requests_total{{outcome="{outcome}"}} 1.0' in metrics.render().decode()


def test_a_ledger_that_is_opened_again_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    for name in ("first", "second"):
        with Ledger.opened(path, Metrics()) as ledger, ledger.account(request(name)):
            assert len(records(path)) == (name == "second")  # a record is written at the end, and at once
    assert [record["request_id"] for record in records(path)] == ["first", "second"]


def test_without_a_file_records_go_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), Ledger.opened(None, Metrics()) as ledger, ledger.account(request()) as account:
        used(account)
    (line,) = [record for record in caplog.records if record.message == "usage"]
    assert vars(line)["request_id"] == "r-1"
    assert vars(line)["completion_tokens"] == 6


def test_the_first_token_is_timed_once() -> None:
    account = Account(request())
    assert account.first_token_seconds is None
    account.note_token()
    first = account.first_token_seconds
    account.note_token()
    assert first is not None
    assert account.first_token_seconds == first <= account.seconds


def test_tokens_of_ended_requests_are_summed_by_kind() -> None:
    metrics = Metrics()
    with Ledger.opened(None, metrics) as ledger:
        for name in ("first", "second"):
            with ledger.account(request(name)) as account:
                used(account)
    text = metrics.render().decode()
    for kind, tokens in {"prompt": 80, "completion": 12, "cached_local": 32, "cached_store": 16}.items():
        assert f'twostroke_tokens_total{{kind="{kind}"}} {tokens}.0' in text
    assert "gen_ai_server_time_to_first_token_seconds_count 2.0" in text
