"""A prompt that cannot be computed to its end: its caller is told why, and nobody else notices; decode least of all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.alone import Alone
from tests.support.cluster import Cluster, Shape, started, tiny_model
from tests.support.routed import Answering, Question
from twostroke.errors import ContextTooLong, Internal
from twostroke.types import StopConditions

POISON = 7  # a token whose values are beyond float32
STOPS = StopConditions(max_tokens=12, ignore_eos=True)
HEAD = tuple((at * at + 11) % 251 for at in range(150))
TAIL = tuple((at * 5 + 20) % 251 for at in range(50))


def poisoned(folder: Path) -> Path:
    """A tiny model that reads every token as others do but one, which alone has the first element of a hidden state."""
    path = tiny_model(folder) / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, 0] = 0
    embedding[POISON] = 0.25 * (np.arange(embedding.shape[1]) == 0)
    tensors["model.layers.0.self_attn.v_proj.weight"][:, 0] = 1e38
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return poisoned(tmp_path_factory.mktemp("poisoned"))


@pytest.fixture
async def cluster(model: Path) -> AsyncIterator[Cluster]:
    # Chunks of 16 let many blocks be published before the step that fails.
    async with started(Shape(model=model, max_chunk=16)) as running:
        yield running


async def test_a_step_that_fails_half_way_is_told_as_it_is_and_decode_never_starts(
    cluster: Cluster, model: Path
) -> None:
    assert POISON not in (*HEAD, *TAIL)
    steps = cluster.decode[0].engine.load().steps
    beside = Question(prompt=TAIL, stops=STOPS)
    broken = Question(prompt=(*HEAD, POISON, *TAIL), stops=STOPS)
    for _ in range(2):
        with pytest.raises(Internal, match="not finite"):
            await Answering(broken).asked(cluster.client)
    assert cluster.decode[0].engine.load().steps == steps
    asking = asyncio.create_task(Answering(beside).asked(cluster.client))
    body = {"prompt": broken.prompt, "max_tokens": 12, "stream": True}
    async with aiohttp.ClientSession() as http, http.post(f"{cluster.http}/v1/completions", json=body) as response:
        told = await response.text()
        assert response.status == 500 or ("not finite" in told and "[DONE]" not in told)
    await cluster.settled()
    async with Alone.started(model) as alone:
        (await asking).assert_same(await beside.alone(alone))
        whole = Question(prompt=(*HEAD, *TAIL), stops=STOPS)
        answer = await Answering(whole).asked(cluster.client)
        answer.assert_same(await whole.alone(alone))
        assert answer.usage.cached.total == len(HEAD) // 16 * 16  # what was published is true for anyone


async def test_a_prompt_beyond_the_context_reaches_no_worker(cluster: Cluster) -> None:
    steps = [worker.engine.load().steps for worker in cluster.workers]
    for prompt, most in ((range(4_097), 1), (range(4_000), 97)):
        with pytest.raises(ContextTooLong):
            await cluster.client.complete(tuple(each % 251 for each in prompt), max_tokens=most)
    assert [worker.engine.load().steps for worker in cluster.workers] == steps
