"""The router's own text path behind the HTTP door: tokenizer, template, limits and stop strings are the real ones.

Only the tokens of the answer are written down beforehand. A token is a byte, so lengths can be counted by hand.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from services.router.answer import Answer
from services.router.fleet import ServedModel
from services.router.prompt import prepare
from tests.support.script import MODEL, Scripted, served
from tests.support.tiny_tokenizer import CHATML, IM_END, VOCAB_SIZE, write_tiny_tokenizer
from twostroke.cluster import ModelInfo
from twostroke.kv.format import KvFormat
from twostroke.text.folder import bundle_from_folder
from twostroke.text.template import ChatTemplate
from twostroke.text.tokenizer import Tokenizer
from twostroke.types import Event, FinishReason, GenerateRequest, Started, Token, Usage

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hi"}
FORMAT = KvFormat(
    model=MODEL.id,
    weights_digest=bytes(16),
    weight_mode="f32",
    layers=2,
    kv_heads=2,
    head_dim=8,
    block_tokens=16,
    dtype="float32",
    rope_digest=bytes(16),
)


def model(folder: Path, template: str = CHATML, context: int = MODEL.context_tokens) -> ServedModel:
    write_tiny_tokenizer(folder, chat_template=template)
    bundle = bundle_from_folder(folder)
    info = ModelInfo(
        id=MODEL.id,
        architecture="llama",
        context_tokens=context,
        vocab_size=VOCAB_SIZE,
        end_token_ids=frozenset({IM_END}),
        weight_mode="f32",
        tokenizer_digest=bundle.digest,
        fingerprint=MODEL.fingerprint,
    )
    tokenizer, chat = Tokenizer(bundle), ChatTemplate.from_bundle(bundle)
    return ServedModel(info=info, kv_format=FORMAT, tokenizer=tokenizer, template=chat, created=MODEL.created)


class Saying(Scripted):
    """Writes the same pieces for every request: each comes at once, whether it is text, bytes or control tokens."""

    def __init__(self, model: ServedModel, *pieces: str | Sequence[int]) -> None:
        super().__init__(script=lambda _: ())
        self._model = model
        self._pieces = [tuple(each.encode()) if isinstance(each, str) else tuple(each) for each in pieces]

    async def generate(self, request: GenerateRequest, deadline: float | None) -> AsyncGenerator[Event, None]:
        prompt = await asyncio.to_thread(prepare, self._model, request)
        self.requests.append(request)
        yield Started(
            request_id=request.context.request_id,
            model=self._model.info.id,
            seed=request.sampling.seed,
            prompt_tokens=len(prompt.ids),
            fingerprint=self._model.info.fingerprint,
        )
        stops, stop = prompt.stops, request.stop_strings
        answer = Answer(request.n, self._model.tokenizer, stop, min_tokens=stops.min_tokens)
        for choice in answer.choices:
            for tokens, finish in self._written(stops.max_tokens, request.sampling.logprobs):
                choice.push(tokens, finish)
                for event in choice.take():
                    yield event
                if choice.finish is not None:
                    break
        yield Usage(prompt_tokens=len(prompt.ids), completion_tokens=answer.completion_tokens)

    def _written(self, room: int, logprobs: int | None) -> Iterator[tuple[list[Token], FinishReason | None]]:
        for piece in self._pieces:
            tokens = [_token(each, logprobs) for each in piece[:room]]
            room -= len(tokens)
            ended = FinishReason.STOP if IM_END in piece else None
            yield tokens, ended if room else ended or FinishReason.LENGTH
        yield [], FinishReason.STOP

    def token_bytes(self, token_id: int) -> bytes:
        return self._model.tokenizer.token_bytes(token_id)

    def control_name(self, token_id: int) -> str | None:
        return self._model.tokenizer.control_name(token_id)


def _token(id_: int, logprobs: int | None) -> Token:
    if logprobs is None:
        return Token(id_)
    others = [(id_ + step) % VOCAB_SIZE for step in range(logprobs)]
    return Token(id_, -0.25, tuple((other, -0.25 - at) for at, other in enumerate(others)))


class Caller:
    """Asks the door, both ways."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = url
        self._http = http

    async def whole(self, path: str, **body: Any) -> tuple[int, Any]:
        async with self._http.post(self._url + path, json=_prompted(path, body)) as response:
            return response.status, await response.json()

    async def chunks(self, path: str, **body: Any) -> list[Any]:
        """Chunks that carry a choice, of a stream that said it was complete."""
        async with self._http.post(self._url + path, json=_prompted(path, body) | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            frames = [frame.removeprefix("data: ") for frame in (await response.text()).split("\n\n") if frame]
        assert frames.pop() == "[DONE]"
        return [json.loads(frame)["choices"][0] for frame in frames]

    async def both(self, path: str, **body: Any) -> tuple[list[str], str, str]:
        """Pieces of text as they were streamed, the same answer's whole text, and its finish reason."""
        streamed = [text_of(choice) for choice in await self.chunks(path, **body)]
        status, answer = await self.whole(path, **body)
        assert status == 200, answer
        pieces = [piece for piece in streamed if piece]
        assert "".join(pieces) == text_of(answer["choices"][0])
        return pieces, "".join(pieces), answer["choices"][0]["finish_reason"]


def _prompted(path: str, body: dict[str, Any]) -> dict[str, Any]:
    return ({"messages": [USER]} if path == CHAT else {"prompt": "Hi"}) | body


def text_of(choice: Any) -> str | None:
    """The text that a choice carries, whole or in a chunk, in the form of either endpoint."""
    if "text" in choice:
        return str(choice["text"])
    content: str | None = choice.get("message", choice.get("delta")).get("content")
    return content


@asynccontextmanager
async def asking(generator: Saying) -> AsyncIterator[Caller]:
    async with served(generator) as url, aiohttp.ClientSession() as http:
        yield Caller(url, http)
