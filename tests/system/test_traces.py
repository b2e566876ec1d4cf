"""One trace a request, over all services; none when tracing is off."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.support.cluster import Shape, started, tiny_model
from tests.support.collector import Collector
from twostroke.telemetry import JsonFormatter, TelemetrySettings, configure_logging, telemetry, traceparent_of

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STAGES = {
    "twostroke.request": None,
    "twostroke.tokenize": "twostroke.request",
    "twostroke.lookup": "twostroke.request",
    "twostroke.place": "twostroke.request",
    "twostroke.prefill": "twostroke.request",
    "twostroke.compute": "twostroke.prefill",
    "twostroke.publish": "twostroke.compute",
    "twostroke.handoff": "twostroke.request",
    "twostroke.decode": "twostroke.handoff",
    "twostroke.steps": "twostroke.decode",
}


@pytest.fixture
def quiet_logging():
    """Setting up telemetry sets up logging; put pytest's back afterwards."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before


async def test_one_request_is_one_trace_whose_spans_hang_together(tmp_path: Path, quiet_logging: None) -> None:
    prompt = "a secret " * 20
    async with Collector.started() as collector:
        with telemetry("test", TelemetrySettings(otlp_endpoint=collector.address)) as spans:
            async with (
                started(Shape(model=tiny_model(tmp_path / "model"), spans=spans)) as cluster,
                aiohttp.ClientSession() as http,
            ):
                body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True}
                headers = {"traceparent": CALLER}
                async with http.post(f"{cluster.http}/v1/completions", json=body, headers=headers) as response:
                    assert response.status == 200
                await collector.until(*STAGES)
        ours = {span.id: span for span in collector.spans if span.trace == CALLER.split("-")[1]}
        names = {span.name: span for span in ours.values()}
        assert names["twostroke.request"].parent == CALLER.split("-")[2]
        for name, parent in STAGES.items():
            if parent is not None:
                assert ours[names[name].parent].name == parent, name
        assert not [span for span in ours.values() if "secret" in json.dumps(dict(span.attributes), default=str)]


async def test_a_long_prompt_that_is_loaded_ahead_is_still_one_trace(tmp_path: Path, quiet_logging: None) -> None:
    model = tiny_model(tmp_path / "model")
    async with Collector.started() as collector:
        with telemetry("test", TelemetrySettings(otlp_endpoint=collector.address)) as spans:
            async with started(Shape(model=model, spans=spans, max_chunk=64)) as cluster:
                await cluster.client.complete(tuple(range(200)) * 8, max_tokens=4, ignore_eos=True)
            await collector.until("twostroke.request", "twostroke.prefetch")
        assert len({span.trace for span in collector.spans}) == 1


async def test_a_dead_collector_costs_no_request_and_no_shutdown(tmp_path: Path, quiet_logging: None) -> None:
    async with asyncio.timeout(60):
        with telemetry("test", TelemetrySettings(otlp_endpoint="http://127.0.0.1:1")) as spans:
            async with started(Shape(model=tiny_model(tmp_path / "model"), spans=spans)) as cluster:
                answer = await cluster.client.complete("hello", max_tokens=4, ignore_eos=True)
                assert len(answer.tokens) == 4


def test_without_an_endpoint_the_sdk_is_not_even_imported() -> None:
    code = (
        "import sys\n"
        "from twostroke.telemetry import TelemetrySettings, telemetry\n"
        "with telemetry('x', TelemetrySettings()) as spans:\n"
        f"    with spans.span('a', parent={CALLER!r}) as span:\n"
        f"        assert span.child('b').metadata == (('traceparent', {CALLER!r}),)\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_log_line_is_one_json_object_with_its_fields() -> None:
    record = logging.LogRecord("a", logging.WARNING, "f", 1, "lost\n%s", ("x",), None)
    record.worker = "w1"
    line = JsonFormatter("router").format(record)
    assert "\n" not in line
    told = json.loads(line)
    assert (told["service"], told["level"], told["event"], told["worker"]) == ("router", "warning", "lost\nx", "w1")


@pytest.mark.parametrize("given", ["", "nonsense", "00-" + "0" * 31 + "-b7ad6b7169203331-01", CALLER + "x" * 100])
def test_a_malformed_traceparent_is_no_traceparent(given: str) -> None:
    assert traceparent_of({"traceparent": given}) is None
    assert traceparent_of([("Traceparent", CALLER)]) == CALLER


def test_log_lines_of_a_request_name_it(capsys: pytest.CaptureFixture[str], quiet_logging: None) -> None:
    configure_logging("router", "info")
    logging.getLogger("x").info("hello", extra={"n": 1})
    assert json.loads(capsys.readouterr().err)["n"] == 1
