"""The same answer from one engine in one process: what the cluster is held to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.backends import CPU
from twostroke.engine.engine import Engine, EngineSettings
from twostroke.engine.matrix import WeightMode
from twostroke.engine.mode import KvMode
from twostroke.engine.sequence import EngineRequest
from twostroke.engine.weights import load_model
from twostroke.kv.keys import root_key
from twostroke.text.loading import load_bundle
from twostroke.text.stops import TextStream
from twostroke.text.tokenizer import Tokenizer
from twostroke.types import FinishReason, SamplingParams, StopConditions, Token


@dataclass(frozen=True)
class Told:
    """One choice."""

    tokens: tuple[Token, ...]
    text: str
    finish: FinishReason

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)


class Alone:
    """One engine, without any service."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self._tokenizer = tokenizer
        self._count = 0

    @classmethod
    @asynccontextmanager
    async def started(
        cls, model: Path, weights: WeightMode = WeightMode.F32, kv: KvMode = KvMode.AUTO
    ) -> AsyncIterator[Alone]:
        loaded = load_model(model, mode=weights, backend=CPU)
        async with Engine.start(EngineSettings(pages=1_025), loaded.model, loaded.kv_format(kv=kv)) as engine:
            yield cls(engine, Tokenizer(load_bundle(model)))

    async def answer(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        stops: StopConditions,
        *,
        n: int = 1,
        stop_strings: Sequence[str] = (),
    ) -> list[Told]:
        """Each choice computed from nothing: no cache is shared between calls."""
        return [await self._choice(tuple(prompt), sampling, stops, choice, stop_strings) for choice in range(n)]

    async def _choice(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        stops: StopConditions,
        choice: int,
        stop_strings: Sequence[str],
    ) -> Told:
        self._count += 1
        request = EngineRequest(
            id="alone",
            prompt=prompt,
            root=root_key(self.engine.format.digest, f"alone-{self._count}"),
            sampling=sampling,
            stops=stops,
            choices=(choice,),
        )
        stream, text = TextStream(self._tokenizer, stop_strings, min_tokens=stops.min_tokens), ""
        tokens: list[Token] = []
        finish: FinishReason | None = None
        async with self.engine.submit(request) as outputs:
            async for output in outputs:
                delta = stream.push([token.id for token in output.tokens])
                text += delta.text
                tokens += output.tokens[: delta.tokens_used]
                finish = FinishReason.STOP if delta.stopped else output.finish
                if finish is not None:
                    break
        assert finish is not None
        rest = stream.finish()  # what only the end completes may be a stop string too
        return Told(tuple(tokens), text + rest.text, FinishReason.STOP if rest.stopped else finish)
