"""Answers written down beforehand, for tests of the doors: what the dispatch would say, as data."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import openai

from services.router.access import Access, Everybody
from services.router.gateway.app import http_door
from services.router.gateway.generator import ModelCard
from services.router.gateway.settings import GatewaySettings
from twostroke.rpc.gate import Gate
from twostroke.types import (
    Advice,
    Advised,
    CachedTokens,
    ChoiceFinished,
    Delta,
    Event,
    FinishReason,
    GenerateRequest,
    Started,
    Token,
    Usage,
)

MODEL = ModelCard(id="tiny/paper", fingerprint="fp-1", weight_mode="f32", context_tokens=256, created=1_700_000_000)
PROMPT_TOKENS = 5

Step = Event | Exception | asyncio.Event | asyncio.Barrier  # said, raised, or waited for
Script = Callable[[GenerateRequest], Iterable[Step]]


def started(request: GenerateRequest) -> Started:
    return Started(
        request_id=request.context.request_id,
        model=MODEL.id,
        seed=request.sampling.seed,
        prompt_tokens=PROMPT_TOKENS,
        fingerprint=MODEL.fingerprint,
    )


def bytewise(text: str, logprobs: int | None = None) -> list[Token]:
    """A token per byte, as in a tokenizer without merges; the alternatives are the neighbours' ids."""
    if logprobs is None:
        return [Token(byte) for byte in text.encode()]
    return [
        Token(byte, -0.5, tuple(((byte + step) % 256, -0.5 - step) for step in range(logprobs)))
        for byte in text.encode()
    ]


def said(request: GenerateRequest, *pieces: str, reason: FinishReason = FinishReason.STOP) -> list[Step]:
    """Every choice says the same pieces, a delta each; text comes with the last byte of the piece."""
    steps: list[Step] = [started(request)]
    counts = dict.fromkeys(range(request.n), 0)
    for sequence, piece in enumerate(pieces, start=1):
        tokens = bytewise(piece, request.sampling.logprobs)
        for choice in range(request.n):
            counts[choice] += len(tokens)
            steps.append(delta(piece, tokens, choice=choice, sequence=sequence, total=counts[choice]))
    steps += [ChoiceFinished(choice, reason) for choice in range(request.n)]
    cached = CachedTokens(local=1, store=2)
    steps.append(Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=sum(counts.values()), cached=cached))
    return steps


def delta(text: str, tokens: Sequence[Token] = (), *, choice: int = 0, sequence: int = 1, total: int = 1) -> Delta:
    return Delta(choice=choice, sequence=sequence, text=text, tokens=tuple(tokens), total_tokens=total)


@dataclass
class Scripted:
    """A generator that follows a script. What it saw and how far it came is there to be asked."""

    script: Script
    models: Sequence[ModelCard] = (MODEL,)
    readiness: str | None = None
    requests: list[GenerateRequest] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # time limit of each request
    open: int = 0
    most_open: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)  # some request has ended

    async def generate(self, request: GenerateRequest, deadline: float | None) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        if deadline is not None:
            self.seconds.append(deadline - asyncio.get_running_loop().time())
        running = False
        try:
            for step in self.script(request):
                if isinstance(step, asyncio.Event | asyncio.Barrier):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield step
                    if not running:  # somebody came back for more than Started
                        running, self.open = True, self.open + 1
                        self.most_open = max(self.most_open, self.open)
        finally:
            self.open -= running
            self.closed.set()

    async def advise(self, advice: Advice, request: GenerateRequest, deadline: float) -> Advised:
        """Says what it was asked for in numbers: a token a block, one of which it is good for."""
        self.requests.append(request)
        self.seconds.append(deadline - asyncio.get_running_loop().time())
        count = len(request.prompt)
        return Advised(
            model=MODEL.id, prompt_tokens=count, prompt_blocks=count, blocks=1, keep_for=request.keep_for and 60.0
        )

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def control_name(self, token_id: int) -> str | None:
        return "<|end|>" if token_id == 256 else None

    def render_metrics(self) -> bytes:
        return b"twostroke_open_requests 0\n"


@asynccontextmanager
async def served(
    generator: Scripted, gate: Gate | None = None, access: Access | None = None, **settings: float
) -> AsyncIterator[str]:
    """The door on a free port; gives its base URL."""
    bounds = GatewaySettings(http_listen="127.0.0.1:0", **settings)  # type: ignore[arg-type]
    async with http_door(bounds, generator, gate or Gate(64), access or Everybody(), drain_seconds=1.0) as address:
        yield f"http://{address}"


@asynccontextmanager
async def sdk(generator: Scripted, **settings: float) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        served(generator, None, None, **settings) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def frames(url: str, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream; the last is the string [DONE] when the answer was complete."""
    async with aiohttp.ClientSession(url) as http, http.post(path, json=body | {"stream": True}) as response:
        assert response.status == 200
        lines = (await response.text()).split("\n\n")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


def hello(request: GenerateRequest) -> list[Step]:
    return said(request, "Hel", "lo", "!")
