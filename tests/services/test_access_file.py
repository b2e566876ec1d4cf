"""The router follows its file of keys: what changes there holds soon, what is broken there changes nothing."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from services.router.access import KeyRing, access
from tests.support.apikeys import bearer, tenant, write_keys
from twostroke.access.caller import Caller
from twostroke.errors import Unauthenticated
from twostroke.settings import InvalidSetting

SECONDS = 20.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def caller(ring: object, key: str) -> Caller | None:
    assert isinstance(ring, KeyRing)
    try:
        return ring.caller(list(bearer(key).values()))
    except Unauthenticated:
        return None


def ring_of(path: Path) -> KeyRing:
    return KeyRing(path, path.read_bytes())


def written(path: Path, text: str | None) -> str:
    """What the file held; from now on it holds `text`, or is not there."""
    before = path.read_text() if path.exists() else ""
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text)
    return before


async def test_a_key_that_is_added_is_let_in_and_one_that_is_removed_no_longer(path: Path) -> None:
    (old,) = write_keys(path, tenant("a"))
    async with access(path) as ring:
        assert caller(ring, old) == tenant("a")
        (new,) = write_keys(path, tenant("b"))
        async with asyncio.timeout(SECONDS):
            while caller(ring, old) is not None:
                await asyncio.sleep(0.02)  # it is the file that is looked at now and then
        assert caller(ring, new) == tenant("b")


async def test_a_broken_file_keeps_the_old_keys_and_is_logged_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (key,) = write_keys(path, tenant("a"))
    ring = ring_of(path)
    good = written(path, "")
    for broken in (good + "[[key]]\n", good + good, "", None):
        written(path, broken)
        caplog.clear()
        for _ in range(3):
            await ring.refresh()
            assert caller(ring, key) == tenant("a")
        (record,) = caplog.records
        assert (record.levelname, record.getMessage()) == ("ERROR", "API keys not read; the old ones stay")
    written(path, good)
    caplog.clear()
    for _ in range(3):
        await ring.refresh()
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("INFO", "API keys read")
    assert caller(ring, key) == tenant("a")


async def test_a_change_within_the_resolution_of_a_files_time_is_seen(path: Path) -> None:
    (key,) = write_keys(path, tenant("a"))
    ring = ring_of(path)
    written(path, written(path, None).replace('"a"', '"b"'))
    await ring.refresh()
    assert caller(ring, key) == tenant("b")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has 0 keys"),
        ("[[key]]\ntenant = 'a'\n", r"key 1 \(line 1\): sha256 must be"),
        ("[[key", r"is not TOML \(at "),
        (None, "cannot be read: No such file"),
    ],
)
async def test_a_router_does_not_start_with_a_file_that_it_cannot_use(path: Path, text: str | None, said: str) -> None:
    written(path, text)
    with pytest.raises(InvalidSetting, match=f"--api-keys {path}: {said}"):
        async with access(path):
            pass
