"""A weight mode is told wherever a model is, no split changes an answer in it, and no block serves two modes."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.alone import Alone
from tests.support.cluster import Shape, started, tiny_model
from tests.support.launched import launched
from tests.support.routed import Answering, Question
from twostroke.engine.mode import KvMode, WeightMode
from twostroke.errors import FormatMismatch
from twostroke.kv.keys import block_keys, request_root
from twostroke.types import RequestContext, SamplingParams, StopConditions

STOPS = StopConditions(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def prompt_of(length: int) -> tuple[int, ...]:
    dice = random.Random(length)
    return tuple(dice.randrange(256) for _ in range(length))


def logged(state: Path, event: str) -> list[Mapping[str, Any]]:
    """What all services wrote about an event."""
    lines = [json.loads(line) for path in state.glob("*/*.log") for line in path.read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


@pytest.mark.parametrize(
    ("mode", "kv"),
    [*((mode, KvMode.AUTO) for mode in WeightMode), (WeightMode.INT8, KvMode.F32), (WeightMode.F32, KvMode.BF16)],
)
async def test_two_workers_write_what_one_engine_in_the_same_mode_would(
    model: Path, mode: WeightMode, kv: KvMode
) -> None:
    samplings = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, seed=5))
    shape = Shape(model=model, weights=mode, kv=kv, max_chunk=64)
    async with started(shape) as cluster, Alone.started(model, mode, kv) as alone:
        for length in (1, 16, 33, 500):
            for sampling in samplings:
                question = Question(prompt=prompt_of(length), sampling=sampling, stops=STOPS)
                truth = await question.alone(alone)
                for _ in ("cold", "cached"):
                    (await Answering(question).asked(cluster.client)).assert_same(truth)


@pytest.mark.parametrize("mode", WeightMode)
async def test_models_and_answers_name_the_mode(model: Path, mode: WeightMode) -> None:
    body = {"prompt": "x", "max_tokens": 1, "temperature": 0}
    async with started(Shape(model=model, weights=mode)) as cluster, aiohttp.ClientSession(cluster.http) as http:
        async with http.get("/v1/models") as response:
            (card,) = (await response.json())["data"]
        async with http.post("/v1/completions", json=body) as response:
            answer = await response.json()
        (told,) = await cluster.client.models()
    assert card["weight_mode"] == told.weight_mode == mode
    assert card["system_fingerprint"] == answer["system_fingerprint"] == told.fingerprint
    assert told.fingerprint.startswith(f"{mode}-")


async def test_blocks_of_one_mode_are_unknown_to_every_other(model: Path) -> None:
    prompt, context = prompt_of(100), RequestContext(request_id="any")
    async with started(Shape(model=model, weights=WeightMode.F16)) as cluster:
        await Answering(Question(prompt=prompt, stops=STOPS)).asked(cluster.client)
        worker = cluster.prefill[0]
        for mode in WeightMode:
            kv_format = replace(worker.kv_format, weight_mode=mode.value)
            keys = block_keys(request_root(kv_format.digest, context), prompt, kv_format.block_tokens)
            shared = mode is WeightMode.F16
            assert await worker.store.lookup(keys) == (6 if shared else 0)
            assert await worker.engine.cached_blocks(keys) == (6 if shared else 0)
            if not shared:
                with pytest.raises(FormatMismatch, match=f"weight_mode differs: f16 here, {mode} at a stranger"):
                    cluster.node.attach(kv_format, "a stranger")


async def test_a_store_refuses_keys_and_values_of_another_dtype_by_name(model: Path) -> None:
    async with started(Shape(model=model)) as cluster:
        other = cluster.prefill[0].loaded.kv_format(kv=KvMode.F16)
        with pytest.raises(FormatMismatch, match="dtype differs: float32 here, float16 at a stranger"):
            cluster.node.attach(other, "a stranger")


async def test_up_keeps_keys_and_values_in_the_dtype_it_is_told(tmp_path: Path) -> None:
    async with launched(tmp_path, "--kv-dtype", "bf16") as cluster:
        await cluster.ready()
    assert [event["kv"] for event in logged(tmp_path / "state", "model ready")] == ["bfloat16", "bfloat16"]


@pytest.mark.parametrize("mode", [WeightMode.BF16, WeightMode.INT8])
async def test_up_starts_in_the_mode_it_is_told_and_says_so(tmp_path: Path, mode: WeightMode) -> None:
    async with launched(tmp_path, "--weights", mode) as cluster:
        http = await cluster.ready()
        assert f"weights {mode}, 1 prefill" in cluster.lines[-1]
        async with aiohttp.ClientSession(http) as session, session.get("/v1/models") as response:
            (card,) = (await response.json())["data"]
        assert card["weight_mode"] == mode


async def test_up_refuses_a_mode_that_does_not_exist(tmp_path: Path) -> None:
    async with launched(tmp_path, "--weights", "int4") as cluster:
        assert await cluster.ended() == 2
        assert any("int4: must be one of f32, f16, bf16, int8" in line for line in cluster.lines), cluster.lines
