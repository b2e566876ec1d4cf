"""Client: the asyncio client of a cluster. Needs grpcio and protobuf, nothing else.

async with Client("127.0.0.1:8001") as client:
    async for event in client.generate("Once upon a time", max_tokens=32):
        ...
    answer = await client.complete([Message(role="user", content="Hello!")])
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import grpc

from twostroke import limits, wire
from twostroke.access.bearer import authorization
from twostroke.caching import CacheControl
from twostroke.cluster import ModelInfo, Status
from twostroke.errors import InvalidRequest, Overloaded, RouterUnreachable, TwostrokeError, Unavailable
from twostroke.rpc.channel import connect
from twostroke.rpc.deadline import LONGEST_SECONDS, checked_timeout, remaining
from twostroke.rpc.status import domain_errors
from twostroke.types import (
    NO_BIAS,
    CachePolicy,
    ChoiceFinished,
    Delta,
    Event,
    FinishReason,
    GenerateRequest,
    Message,
    Priority,
    RequestContext,
    SamplingParams,
    Started,
    Token,
    Usage,
)
from twostroke.v1 import router_pb2
from twostroke.v1.router_pb2_grpc import RouterServiceStub
from twostroke.wire import worker as worker_wire

if TYPE_CHECKING:
    from twostroke.v1.router_pb2_grpc import RouterServiceAsyncStub

MAX_ATTEMPTS = 4
BACKOFF_SECONDS = (0.1, 2.0)  # the first pause, and the longest


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One whole choice."""

    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason
    usage: Usage  # of the request: the prompt once, all choices summed
    seed: int  # with it the same request gives the same answer


class Client:
    """Talks to one router. Use it as an async context manager, in one event loop.

    Args:
        address: host:port of the router's gRPC door.
        api_key: who asks; by default the environment's TWOSTROKE_API_KEY, where there is one.
    """

    def __init__(self, address: str, *, api_key: str | None = None) -> None:
        if "://" in address:
            raise InvalidRequest(
                f"{address} is a URL; the gRPC door is a host:port, such as 127.0.0.1:8001", field="address"
            )
        self._address = address
        self._metadata = tuple(authorization(api_key, os.environ).items())
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        self._channel = connect(self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    @property
    def cache(self) -> CacheControl:
        """Advice about the stored blocks of prompts."""
        return CacheControl(self._stub, self._metadata)

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        *,
        max_tokens: int | None = None,
        min_tokens: int = 0,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] = NO_BIAS,
        seed: int | None = None,
        logprobs: int | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        n: int = 1,
        model: str = "default",
        continue_final_message: bool = False,
        fold_system: bool = False,
        truncate: bool = False,
        priority: Priority | None = None,
        cache_policy: CachePolicy = CachePolicy.READ_WRITE,
        cache_salt: str = "",
        keep_for: float | None = None,
        session: str | None = None,
        request_id: str | None = None,
        timeout: float = 600.0,
    ) -> AsyncGenerator[Event, None]:
        """Stream an answer: Started, then Deltas, a ChoiceFinished per choice, and Usage last.

        The prompt is raw text, token ids, or a conversation. Absent parameters mean what they mean in the OpenAI API.
        `keep_for` seconds after the answer its blocks are evicted last: advice, as in `Client.cache`.
        What may be tried again safely is: until something was generated, after UNAVAILABLE and OVERLOADED, at the
        server's pace, within `timeout` seconds. Leaving the iterator stops the work.

        Raises: TwostrokeError; InvalidRequest from the call itself, where the fault can be seen here.
        """
        request = GenerateRequest(
            context=RequestContext(
                request_id=request_id or wire.new_request_id(),
                priority=Priority.STANDARD if priority is None else priority,
                cache_policy=cache_policy,
                session=session,
                salt=cache_salt,
            ),
            prompt=prompt if isinstance(prompt, str) else tuple(prompt),  # type: ignore[arg-type]
            sampling=SamplingParams(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                repetition_penalty=repetition_penalty,
                logit_bias=dict(logit_bias),
                seed=wire.draw_seed() if seed is None else seed,
                logprobs=logprobs,
            ),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=frozenset(stop_token_ids),
            ignore_eos=ignore_eos,
            stop_strings=(stop,) if isinstance(stop, str) else tuple(stop),
            n=n,
            model=model,
            continue_final_message=continue_final_message,
            fold_system=fold_system,
            truncate=truncate,
            keep_for=keep_for,
        )
        limits.check_request(request)
        with wire.writing():
            message = wire.generate_request_pb(request, output=router_pb2.OUTPUT_TEXT_AND_TOKENS)
        if priority is None:  # what the API key allows decides
            message.ClearField("priority")
        return self._generate(message, checked_timeout(timeout))

    async def _generate(self, message: router_pb2.GenerateRequest, timeout: float) -> AsyncGenerator[Event, None]:
        deadline = asyncio.get_running_loop().time() + timeout
        told = begun = False
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                async with aclosing(self._events(message, deadline)) as events:
                    async for event in events:
                        again = told and isinstance(event, Started)  # the same one, of an answer that is begun anew
                        told, begun = True, not isinstance(event, Started)
                        if not again:
                            yield event
                return
            except (Unavailable, Overloaded) as error:
                if begun or attempt == MAX_ATTEMPTS:
                    raise
                await _pause(attempt, error, deadline)

    async def _events(self, message: router_pb2.GenerateRequest, deadline: float) -> AsyncGenerator[Event, None]:
        seconds = remaining(deadline, at_most=LONGEST_SECONDS)
        call = self._stub.Generate(message, timeout=seconds, metadata=self._metadata)
        try:
            with domain_errors(lost=RouterUnreachable):
                async for response in call:
                    yield wire.event(response)
        finally:
            call.cancel()

    async def complete(
        self, prompt: str | Sequence[int] | Sequence[Message], *, timeout: float = 600.0, **parameters: object
    ) -> Completion:
        """The whole answer, one choice; parameters as in `generate`. Raises TwostrokeError."""
        if parameters.get("n", 1) != 1:
            raise InvalidRequest("complete returns one choice; use generate for several", field="n")
        text: list[str] = []
        tokens: list[Token] = []
        seed, finish, usage = 0, FinishReason.ERROR, Usage(prompt_tokens=0)
        events = self.generate(prompt, timeout=timeout, **parameters)  # type: ignore[arg-type]
        async with aclosing(events):
            async for event in events:
                match event:
                    case Started():
                        seed = event.seed
                    case Delta():
                        text.append(event.text)
                        tokens.extend(event.tokens)
                    case ChoiceFinished():
                        finish = event.reason
                    case Usage():
                        usage = event
        return Completion(text="".join(text), tokens=tuple(tokens), finish_reason=finish, usage=usage, seed=seed)

    async def models(self, *, timeout: float = 10.0) -> tuple[ModelInfo, ...]:
        """The models served. Raises TwostrokeError."""
        with domain_errors(lost=RouterUnreachable):
            response = await self._stub.ListModels(
                router_pb2.ListModelsRequest(), timeout=checked_timeout(timeout), metadata=self._metadata
            )
        return tuple(worker_wire.model_info(each) for each in response.models)

    async def status(self, *, timeout: float = 10.0) -> Status:
        """How the cluster is. Raises TwostrokeError."""
        with domain_errors(lost=RouterUnreachable):
            response = await self._stub.GetStatus(
                router_pb2.GetStatusRequest(), timeout=checked_timeout(timeout), metadata=self._metadata
            )
        return worker_wire.status(response)

    @property
    def _stub(self) -> RouterServiceAsyncStub:
        if self._channel is None:
            raise RuntimeError("use the client inside `async with`")
        return RouterServiceStub(self._channel)


async def _pause(attempt: int, error: TwostrokeError, deadline: float) -> None:
    """Wait before the next attempt: as long as the server says, or exponentially with jitter.

    Raises the error at once when the deadline would pass in the meantime.
    """
    first, longest = BACKOFF_SECONDS
    hint = error.retry_after
    pause = random.uniform(0, min(first * 2**attempt, longest)) if hint is None else hint
    if asyncio.get_running_loop().time() + pause >= deadline:
        raise error
    await asyncio.sleep(pause)
