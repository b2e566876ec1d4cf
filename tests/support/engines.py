"""Engines over the tiny model, requests for them, and whole answers."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.backends import CPU
from tests.support.tiny import write_tiny
from tests.support.tiny_tokenizer import VOCAB_SIZE
from twostroke.engine.attention import AttentionBackend, Plan
from twostroke.engine.batch import Batch
from twostroke.engine.engine import Engine, EngineRequest, EngineSettings, StepOutput
from twostroke.engine.mode import KvMode
from twostroke.engine.models import Begun, CausalModel
from twostroke.engine.weights import LoadedModel, WeightMode, load_model
from twostroke.types import FinishReason, SamplingParams, StopConditions, Token

GREEDY = SamplingParams(temperature=0.0)
_roots = count()


@cache
def tiny() -> LoadedModel:
    with tempfile.TemporaryDirectory() as folder:
        return load_model(write_tiny(Path(folder)), mode=WeightMode.F32, backend=CPU)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 256, length).tolist())


def asked(
    prompt: Sequence[int],
    *,
    max_tokens: int = 12,
    sampling: SamplingParams = GREEDY,
    stops: StopConditions | None = None,
    root: bytes | None = None,
) -> EngineRequest:
    """A request; without a root of its own it shares blocks with no other."""
    return EngineRequest(
        id="test",
        prompt=tuple(prompt),
        root=b"alone %d" % next(_roots) if root is None else root,
        sampling=sampling,
        stops=stops or StopConditions(max_tokens=max_tokens, ignore_eos=True),
    )


@asynccontextmanager
async def engine_of(
    model: CausalModel | None = None, *, pages: int = 129, kv: KvMode = KvMode.AUTO, **settings: Any
) -> AsyncIterator[Engine]:
    """An engine that proves on leaving that every page came back."""
    chosen = EngineSettings(**{"pages": pages, "tokens_per_step": 64, "max_running": 16} | settings)
    async with Engine.start(chosen, model or tiny().model, tiny().kv_format(kv=kv)) as engine:
        yield engine
        await engine.idle()
        load = engine.load()
        assert not load.busy
        assert load.lent_pages == 0
        assert load.free_pages + load.evictable_pages == load.pages == pages - 1


@dataclass(frozen=True)
class Answer:
    """All that came of a request."""

    tokens: tuple[Token, ...]
    finish: FinishReason | None
    cached: int

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)


async def answer(engine: Engine, request: EngineRequest) -> Answer:
    outputs = await outputs_of(engine, request)
    engine.release_pages([block.page for output in outputs for block in output.filled])
    whole = StepOutput.merged(outputs)
    return Answer(whole.tokens, whole.finish, whole.cached)


async def outputs_of(engine: Engine, request: EngineRequest) -> list[StepOutput]:
    async with engine.submit(request) as outputs:
        return [output async for output in outputs]


async def split(prefill: Engine, decode: Engine, request: EngineRequest) -> Answer:
    """Prompt and first token on one engine, the pages' bytes carried over, the rest on another."""
    outputs = await outputs_of(prefill, replace(request, first_token_only=True, export=True))
    first = StepOutput.merged(outputs)
    pages = await decode.take_pages(len(first.filled))
    assert len(pages) == len(first.filled)
    for target, block in zip(pages, first.filled, strict=True):
        decode.cache.rows()[target] = prefill.cache.rows()[block.page]
    prefill.release_pages([block.page for block in first.filled])
    await decode.adopt_pages([(page, block.key, block.tokens) for page, block in zip(pages, first.filled, strict=True)])
    if first.finish is not None:
        return Answer(first.tokens, first.finish, first.cached)
    emitted = tuple(token.id for token in first.tokens)
    rest = await answer(decode, replace(request, emitted=emitted, max_uncached=1))
    return Answer(first.tokens + rest.tokens, rest.finish, first.cached)


class Fragile:
    """The tiny model with five tokens on which it fails or waits: a model as bad as a model can be."""

    SPOILS, RAISES, KILLS, WAITS, GROWS = range(VOCAB_SIZE - 5, VOCAB_SIZE)

    def __init__(self) -> None:
        self.backend = CPU
        self._model = tiny().model
        self.config = self._model.config
        self.entered = threading.Event()
        self.gate = threading.Event()

    def begin(self, token_ids: Tensor, positions: Tensor) -> Begun:
        if (token_ids == self.RAISES).any():
            raise RuntimeError("broken kernel")
        if (token_ids == self.KILLS).any():
            raise SystemExit
        if (token_ids == self.WAITS).any():
            self.entered.set()
            self.gate.wait(30)
        return *self._model.begin(token_ids, positions), token_ids == self.SPOILS, token_ids == self.GROWS

    def layers(self, begun: Begun, attention: AttentionBackend, plan: Plan) -> Tensor:
        *rest, spoils, grows = begun
        hidden = self._model.layers(tuple(rest), _Growing(attention, grows), plan)
        return torch.where(spoils[:, None], torch.nan, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


class _Growing:
    """Attention to values that are a million times as large at some tokens."""

    def __init__(self, attention: AttentionBackend, at: Tensor) -> None:
        self._attention, self._growth = attention, torch.where(at, 1e6, 1.0)[:, None, None]

    def plan(self, batch: Batch) -> Plan:
        return self._attention.plan(batch)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        return self._attention.attend(layer, q, k, v * self._growth, plan)


@contextmanager
def steps_held(engine: Engine) -> Iterator[threading.Event]:
    """The engine's thread stands still, as in a long step, before the event is set, or the block is left."""
    go = threading.Event()
    engine._exchange.do(lambda core: () if go.wait(30) else None)
    try:
        yield go
    finally:
        go.set()
