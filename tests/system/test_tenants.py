"""Who may read what: cached blocks stay with a tenant's namespace, and keys stay out of everything that is written."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.apikeys import bearer, tenant, write_keys
from tests.support.cluster import Cluster, Shape, started, tiny_model
from tests.support.collector import Collector
from twostroke.access.keyfile import digest_of
from twostroke.client import Client
from twostroke.errors import PermissionDenied, Unauthenticated
from twostroke.telemetry import JsonFormatter, TelemetrySettings, telemetry
from twostroke.types import Priority

PROMPT = tuple(range(1, 101))
ALL = len(PROMPT) - 1  # the last token is always computed
HOW: dict[str, Any] = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}


async def cached(cluster: Cluster, key: str, salt: str = "") -> int:
    """Prompt tokens that the cluster had for this key, over gRPC."""
    async with Client(cluster.doors.grpc, api_key=key) as client:
        return (await client.complete(PROMPT, cache_salt=salt, **HOW)).usage.cached.total


async def cached_http(cluster: Cluster, key: str, **told: str) -> int:
    """The same over HTTP."""
    body = {"prompt": PROMPT, **HOW, **told}
    async with (
        aiohttp.ClientSession(cluster.http, headers=bearer(key)) as http,
        http.post("/v1/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        return int((await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_no_tenant_finds_what_another_has_cached_whatever_it_sends(tmp_path: Path) -> None:
    path, ledger = tmp_path / "keys.toml", tmp_path / "usage.jsonl"
    a, b = write_keys(path, tenant("a"), tenant("b"))
    shape = Shape(model=tiny_model(tmp_path / "model"), api_keys=path, usage_log=ledger)
    async with started(shape) as cluster:
        assert [await cached(cluster, a) for _ in range(2)] == [0, ALL]
        assert [await cached(cluster, a, "s") for _ in range(2)] == [0, ALL]
        assert [await cached(cluster, b, salt) for salt in ("", "s", "a", "salt:s")] == [0, 0, 0, 0]
        assert [await cached_http(cluster, b, cache_salt=salt, user="a") for salt in ("t", "t")] == [0, ALL]
        assert [await cached_http(cluster, each) for each in (a, b)] == [ALL, ALL]  # each finds its own
    tenants = [json.loads(line)["tenant"] for line in ledger.read_text().splitlines()]
    assert tenants == ["a"] * 4 + ["b"] * 6 + ["a", "b"]


async def test_tenants_of_one_namespace_share_and_a_salt_still_narrows(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    a, b, outsider = write_keys(path, tenant("a", "public"), tenant("b", "public"), tenant("c"))
    async with started(Shape(model=tiny_model(tmp_path / "model"), api_keys=path)) as cluster:
        assert [await cached(cluster, key) for key in (a, b, outsider)] == [0, ALL, 0]
        assert [await cached(cluster, key, "s") for key in (a, b)] == [0, ALL]
        assert await cached(cluster, b, "t") == 0


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """Setting up telemetry sets up logging; put pytest's back afterwards."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield root
    root.handlers[:], root.level = before


async def test_keys_and_their_hashes_are_written_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, root_logger: logging.Logger
) -> None:
    path, ledger = tmp_path / "keys.toml", tmp_path / "usage.jsonl"
    (key,) = write_keys(path, tenant("a"))
    wrong = "ts-" + key[:2:-1]
    said: list[str] = []
    async with Collector.started() as collector:
        with telemetry("test", TelemetrySettings(otlp_endpoint=collector.address, log_level="debug")) as spans:
            root_logger.addHandler(caplog.handler)
            shape = Shape(model=tiny_model(tmp_path / "model"), api_keys=path, usage_log=ledger, spans=spans)
            async with started(shape) as cluster:
                assert await cached(cluster, key) == 0
                for each in (key, wrong):
                    async with Client(cluster.doors.grpc, api_key=each) as client:
                        with pytest.raises((Unauthenticated, PermissionDenied)) as refused:
                            await client.complete("x", priority=Priority.INTERACTIVE)
                        said.append(str(refused.value))
                    async with aiohttp.ClientSession(cluster.http, headers=bearer(each)) as http:
                        for path_ in ("/v1/completions", "/v1/models", "/metrics", "/nothing"):
                            async with http.post(path_, json={"prompt": each, "n": 0}) as response:
                                said += [await response.text(), str(response.headers)]
            await collector.until("twostroke.request")
    formatter = JsonFormatter("test")
    said += [formatter.format(record) for record in caplog.records]
    said += [ledger.read_text(), repr(collector.spans)]
    everything = "\n".join(said)
    assert all(each in everything for each in ('"tenant": "a"', '"event": "listening"', "twostroke.tokenize"))
    for each in (key, wrong):
        digest = digest_of(each)
        for secret in (each, digest.hex(), repr(digest), base64.b64encode(digest).decode()):
            assert secret not in everything
