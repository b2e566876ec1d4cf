"""CacheControl: a client's advice about the stored blocks of its prompts.

A prompt is named as it is sent to `Client.generate`: raw text, token ids or a conversation. All of it is advice, for
blocks of the caller's own namespace: the answer says how many blocks it was good for, which may be none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from twostroke import limits, wire
from twostroke.errors import RouterUnreachable
from twostroke.rpc.deadline import checked_timeout
from twostroke.rpc.status import domain_errors
from twostroke.types import Advised, GenerateRequest, Message, RequestContext, SamplingParams
from twostroke.v1 import router_pb2
from twostroke.wire import advice

if TYPE_CHECKING:
    from twostroke.v1.router_pb2_grpc import RouterServiceAsyncStub

PROMPT_SECONDS = 10.0
Prompt = str | Sequence[int] | Sequence[Message]


class CacheControl:
    """Made by `Client.cache`. Every method raises TwostrokeError, but not because the store is away."""

    def __init__(self, stub: RouterServiceAsyncStub, metadata: tuple[tuple[str, str], ...]) -> None:
        self._stub = stub
        self._metadata = metadata

    async def keep(
        self,
        prompt: Prompt,
        seconds: float,
        *,
        model: str = "default",
        cache_salt: str = "",
        fold_system: bool = False,
        timeout: float = PROMPT_SECONDS,
    ) -> Advised:
        """Have a prompt's blocks evicted last for so many seconds, of which the store may grant less."""
        stored = _stored(prompt, model, cache_salt, fold_system, seconds)
        request = router_pb2.KeepPromptRequest(prompt=stored, keep_for=wire.duration_pb(seconds))
        with domain_errors(lost=RouterUnreachable):
            response = await self._stub.KeepPrompt(request, timeout=checked_timeout(timeout), metadata=self._metadata)
        return advice.advised(response.advised, response.keep_for if response.HasField("keep_for") else None)

    async def release(
        self,
        prompt: Prompt,
        *,
        model: str = "default",
        cache_salt: str = "",
        fold_system: bool = False,
        timeout: float = PROMPT_SECONDS,
    ) -> Advised:
        """Have a prompt's blocks evicted first."""
        request = router_pb2.ReleasePromptRequest(prompt=_stored(prompt, model, cache_salt, fold_system))
        with domain_errors(lost=RouterUnreachable):
            response = await self._stub.ReleasePrompt(
                request, timeout=checked_timeout(timeout), metadata=self._metadata
            )
        return advice.advised(response.advised)

    async def prefetch(
        self,
        prompt: Prompt,
        *,
        model: str = "default",
        cache_salt: str = "",
        fold_system: bool = False,
        timeout: float = PROMPT_SECONDS,
    ) -> Advised:
        """Have a prompt's blocks brought into memory from the store's disk."""
        request = router_pb2.PrefetchPromptRequest(prompt=_stored(prompt, model, cache_salt, fold_system))
        with domain_errors(lost=RouterUnreachable):
            response = await self._stub.PrefetchPrompt(
                request, timeout=checked_timeout(timeout), metadata=self._metadata
            )
        return advice.advised(response.advised)


def _stored(
    prompt: Prompt, model: str, cache_salt: str, fold_system: bool, keep_for: float | None = None
) -> router_pb2.StoredPrompt:
    request = GenerateRequest(
        context=RequestContext(request_id="-", salt=cache_salt),
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),  # type: ignore[arg-type]
        sampling=SamplingParams(),
        model=model,
        fold_system=fold_system,
        keep_for=keep_for,
    )
    limits.check_request(request)
    with wire.writing():
        return advice.stored_prompt_pb(request)
