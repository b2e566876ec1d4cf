"""What an operator may tell the directory, and what of it is never said again."""

from __future__ import annotations

from typing import Any

import pytest

from services.kvstore.directory.link import shown
from services.kvstore.directory.peer import Peer
from services.kvstore.directory.settings import DirectorySettings
from twostroke.settings import InvalidSetting, load


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://cache", "redis://cache"),
        ("redis://user:s3cret@cache:6380/2", "redis://cache:6380/2"),
        ("rediss://:s3cret@10.0.0.1:6380", "rediss://10.0.0.1:6380"),
        ("unix://:s3cret@/run/redis.sock", "unix:///run/redis.sock"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, said: str) -> None:
    assert shown(url) == said
    assert "s3cret" not in repr(DirectorySettings(redis_url=url))


@pytest.mark.parametrize(
    "url",
    [
        "cache:6379",
        "http://:s3cret@cache",
        "redis://",
        "redis://:s3cret@cache?max_connections=100000",
        "redis://:s3cret@cache#x",
        "redis://:/s3cret@cache",
        "redis://:x:s3cret",
        "redis://:s3cret@[cache",
        "unix://:s3cret@",
    ],
)
def test_a_wrong_url_is_refused_without_a_word_of_it(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        load(DirectorySettings, prog="kvstore", argv=[], environ={"TWOSTROKE_REDIS_URL": url})
    assert refused.value.code == 2
    said = capsys.readouterr().err
    assert "--redis-url" in said
    assert "s3cret" not in said


@pytest.mark.parametrize(
    "wrong",
    [
        {"redis_prefix": ""},
        {"redis_prefix": "two strokes"},
        {"redis_prefix": "x" * 65},
        {"redis_lookup_seconds": 0.0},
        {"redis_write_seconds": float("nan")},
        {"redis_retry_seconds": 61.0},
        {"directory_ttl_seconds": 0.0},
        {"directory_backlog": 0},
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match=next(iter(wrong)).replace("_", "-")):
        DirectorySettings(**wrong)


def test_a_card_says_what_its_peer_is() -> None:
    one = Peer(incarnation="a", address="h:1", offers=(("tcp", "h:2"), ("grpc", "h:1")), started=1.5)
    assert Peer.from_card("a", one.card()) == one


@pytest.mark.parametrize(
    "card",
    [
        b"",
        b"\xff",
        b"null",
        b"[]",
        b"{}",
        b'{"address": "h:1", "offers": [1], "started": 0}',
        b'{"address": "h:1", "offers": [["a", "b", "c"]], "started": 0}',
        b'{"address": "h:1", "offers": [], "started": "soon"}',
        b"[" * 4_000,
        b'{"address": "' + b"h" * 5_000 + b'", "offers": [], "started": 0}',
    ],
)
def test_a_card_that_is_not_understood_is_none(card: bytes) -> None:
    assert Peer.from_card("a", card) is None


def test_a_card_of_a_later_version_is_understood() -> None:
    card = b'{"address": "h:1", "offers": [], "started": 0, "zone": "x"}'
    assert Peer.from_card("a", card) == Peer(incarnation="a", address="h:1")
