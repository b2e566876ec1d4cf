"""The two doors of a cluster, as one thing to chat through."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from twostroke.access.bearer import API_KEY_VARIABLE, authorization
from twostroke.client import Client
from twostroke.errors import Internal, TwostrokeError, Unavailable, by_reason
from twostroke.launcher.refusal import Refusal
from twostroke.settings import Parser
from twostroke.types import Delta, Message

if TYPE_CHECKING:
    import aiohttp

DEFAULT_ADDRESS = "127.0.0.1:8001"
CONNECT_SECONDS = 5.0
MAX_FRAME_BYTES = 1 << 20


def add_door(parser: Parser, kinds: str = "host:port of the gRPC door") -> None:
    """Let a verb be told where the cluster is, and who asks."""
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help=kinds)
    parser.add_argument("--api-key", help=f"who asks; better in {API_KEY_VARIABLE}, which no list of processes shows")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How an answer is to be made."""

    max_tokens: int | None
    temperature: float
    seconds: float  # time limit of one answer


class Door(Protocol):
    """Answers a conversation."""

    def answer(self, messages: Sequence[Message], manner: Manner) -> AsyncGenerator[str, None]:
        """Text as it is made; closing the generator stops the work. Raises TwostrokeError."""


@asynccontextmanager
async def opened(address: str, api_key: str | None) -> AsyncIterator[Door]:
    """The door at `address`: host:port is gRPC, http://host:port is the OpenAI API.

    Raises: Refusal, when the HTTP client is not installed; InvalidRequest, when the key cannot be one.
    """
    if not address.startswith(("http://", "https://")):
        async with Client(address, api_key=api_key) as client:
            yield GrpcDoor(client)
        return
    try:
        import aiohttp
    except ImportError as error:
        raise Refusal("HTTP needs the package aiohttp", "pip install aiohttp, or give the gRPC address") from error
    headers = authorization(api_key, os.environ)
    async with aiohttp.ClientSession(address, headers=headers, read_bufsize=MAX_FRAME_BYTES) as session:
        yield HttpDoor(session)


class GrpcDoor:
    """RouterService."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def answer(self, messages: Sequence[Message], manner: Manner) -> AsyncGenerator[str, None]:
        """Text as it is made."""
        events = self._client.generate(
            tuple(messages), max_tokens=manner.max_tokens, temperature=manner.temperature, timeout=manner.seconds
        )
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Delta) and event.text:
                    yield event.text


class HttpDoor:
    """The OpenAI API, streamed."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def answer(self, messages: Sequence[Message], manner: Manner) -> AsyncGenerator[str, None]:
        """Text as it is made."""
        import aiohttp

        body = {
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "max_tokens": manner.max_tokens,
            "temperature": manner.temperature,
            "stream": True,
        }
        limits = aiohttp.ClientTimeout(total=manner.seconds, connect=CONNECT_SECONDS)
        try:
            async with self._session.post("/v1/chat/completions", json=body, timeout=limits) as response:
                if response.status != 200:
                    raise error_of(await response.json(content_type=None))
                async for raw in response.content:
                    for text in texts_of(raw):
                        yield text
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Unavailable(f"no answer from the HTTP door: {str(error) or type(error).__name__}") from error


def texts_of(raw: bytes) -> list[str]:
    """The texts in one line of an event stream. Raises the error that the line holds."""
    kind, _, data = raw.decode().strip().partition(": ")
    if kind != "data" or data == "[DONE]":
        return []
    frame = json.loads(data)
    if "error" in frame:
        raise error_of(frame)
    return [text for choice in frame.get("choices", ()) if (text := choice["delta"].get("content"))]


def error_of(body: Any) -> TwostrokeError:
    """The error in a body of OpenAI's shape, as the class that has its reason."""
    told: Mapping[str, Any] = body.get("error", {}) if isinstance(body, Mapping) else {}
    kind = by_reason().get(str(told.get("code")).upper(), Internal)
    return kind(str(told.get("message", "an answer that is not of this API")), field=told.get("param"))
