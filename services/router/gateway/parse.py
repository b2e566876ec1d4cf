"""Request bodies to GenerateRequests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from pydantic import ValidationError

from services.router.gateway.json_text import Json
from services.router.gateway.schema import (
    CHAT_ONLY,
    COMPLETION_ONLY,
    MESSAGE_ONLY,
    WITHOUT_EFFECT,
    Body,
    ChatBody,
    ChatMessage,
    CompletionBody,
    Shape,
)
from twostroke.access.caller import Caller
from twostroke.errors import InvalidRequest
from twostroke.limits import MAX_KEEP_SECONDS, MAX_MESSAGES, MAX_NAME_CHARACTERS, SEED_BITS, check_request
from twostroke.types import CachePolicy, GenerateRequest, Message, Priority, RequestContext, SamplingParams
from twostroke.wire.common import draw_seed

MAX_CHOICES_IN_ALL = 128  # prompts times n

_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")  # one spelling a token, so that no entry hides another
_B = TypeVar("_B", bound=Shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one HTTP request asks for: a GenerateRequest for each prompt, and the form of the answer."""

    requests: tuple[GenerateRequest, ...]
    stream: bool
    usage_at_end: bool
    usage_on_every_chunk: bool
    names: Mapping[str, str]  # what this caller calls fields that have another name in the house

    @property
    def choices(self) -> int:
        """Choices in all; choice c of prompt p has the index p * n + c."""
        return len(self.requests) * self.requests[0].n


def parse_chat(body: Json, request_id: str, caller: Caller) -> Asked:
    """Read a chat completion request. Raises InvalidRequest and PermissionDenied naming the field."""
    _refuse_unsupported(body, CHAT_ONLY)
    refuse_unsupported_messages(body)
    shape = validated(ChatBody, body)
    if shape.add_generation_prompt is shape.continue_final_message:
        raise InvalidRequest(
            "add_generation_prompt must be the opposite of continue_final_message", field="add_generation_prompt"
        )
    if shape.top_logprobs is not None and not shape.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
    request = _request(
        shape,
        prompt=turns(shape.messages),
        context=_context(shape, request_id, caller),
        sampling=_sampling(shape, logprobs=(shape.top_logprobs or 0) if shape.logprobs else None),
        max_tokens=_chat_max_tokens(shape),
        continue_final_message=shape.continue_final_message,
        fold_system=shape.fold_system,
    )
    names = _names(shape)
    if shape.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return _asked(shape, (request,), names)


def parse_completion(body: Json, request_id: str, caller: Caller) -> Asked:
    """Read a completion request. Raises InvalidRequest and PermissionDenied naming the field.

    Prompt p is sampled with seed + p (modulo 2^64), so that equal prompts get different answers and one number replays
    them all.
    """
    _refuse_unsupported(body, COMPLETION_ONLY)
    shape = validated(CompletionBody, body)
    if len(shape.prompt) * shape.n > MAX_CHOICES_IN_ALL:
        raise InvalidRequest(f"prompts times n must be at most {MAX_CHOICES_IN_ALL}", field="n")
    sampling = _sampling(shape, logprobs=shape.logprobs)
    requests = []
    for index, prompt in enumerate(shape.prompt):
        seed = (sampling.seed + index) % (1 << SEED_BITS) if index else sampling.seed
        request = _request(
            shape,
            prompt=prompt,
            context=_context(shape, request_id if len(shape.prompt) == 1 else f"{request_id}-{index}", caller),
            sampling=replace(sampling, seed=seed),
            max_tokens=shape.max_tokens,
        )
        requests.append(request)
    return _asked(shape, tuple(requests), _names(shape) | {"top_logprobs": "logprobs"})


def turns(messages: Iterable[ChatMessage]) -> tuple[Message, ...]:
    """A conversation; the parts of a message are joined."""
    return tuple(
        Message(role=each.role, content="".join(part.text for part in each.content), name=each.name)
        for each in messages
    )


def refuse_unsupported_messages(body: Json) -> None:
    """Refuse what we do not do in messages; drop, in place, what asks for nothing there."""
    if isinstance(body.get("messages"), list):
        for index, message in enumerate(body["messages"][:MAX_MESSAGES]):  # a longer list is refused as such
            if isinstance(message, dict):
                _refuse_unsupported(message, MESSAGE_ONLY, within=f"messages[{index}].")


def _refuse_unsupported(body: Json, known: Mapping[str, tuple[object, ...]], within: str = "") -> None:
    """Refuse what we do not do; drop, in place, what asks for nothing."""
    for name in WITHOUT_EFFECT & body.keys():
        del body[name]
    for name in known.keys() & body.keys():
        value = body.pop(name)
        if not any(type(value) is type(default) and value == default for default in known[name]):
            raise InvalidRequest(f"{within}{name} is not supported", field=within + name)


def validated(kind: type[_B], body: Json) -> _B:
    """Read the shape of a body. Raises InvalidRequest naming the field."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise _invalid(first["type"], first["loc"], first["msg"]) from None  # the cause would hold prompt text


def _invalid(kind: str, location: tuple[int | str, ...], problem: str) -> InvalidRequest:
    field = ""
    for part in location:
        name = str(part)[:MAX_NAME_CHARACTERS]  # names of members come from the caller, in any length
        field += f"[{part}]" if isinstance(part, int) else f".{name}" if field else name
    match kind:
        case "extra_forbidden":
            return InvalidRequest(f"{field} is not a known field", field=field)
        case "missing":
            return InvalidRequest(f"{field} is required", field=field)
        case _:
            return InvalidRequest(f"{field}: {problem[:1].lower()}{problem[1:]}", field=field)


def _chat_max_tokens(shape: ChatBody) -> int | None:
    if shape.max_completion_tokens is None:
        return shape.max_tokens
    if shape.max_tokens not in (None, shape.max_completion_tokens):
        raise InvalidRequest("max_tokens and max_completion_tokens differ; give one", field="max_completion_tokens")
    return shape.max_completion_tokens


def _sampling(shape: Body, *, logprobs: int | None) -> SamplingParams:
    """Sampling parameters with a seed: the caller's, or one drawn here, so that every request can be replayed."""
    given = {name: value for name in _SAMPLING if (value := getattr(shape, name)) is not None}
    seed = draw_seed() if shape.seed is None else shape.seed
    return SamplingParams(**given, seed=seed, logprobs=logprobs, logit_bias=_biases(shape.logit_bias))


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    if not all(map(_TOKEN_ID.fullmatch, given)):
        raise InvalidRequest("logit_bias: each key must be a token id in decimal digits", field="logit_bias")
    return {int(key): bias for key, bias in given.items()}


def _context(shape: Body, request_id: str, caller: Caller) -> RequestContext:
    return RequestContext(
        request_id=request_id,
        tenant=caller.tenant,
        namespace=caller.namespace,
        priority=caller.priority(Priority[shape.priority.upper()] if shape.priority else None),
        cache_policy=CachePolicy(shape.cache_policy),
        session=shape.prompt_cache_key,
        salt=shape.cache_salt,
    )


def _request(
    shape: Body,
    *,
    prompt: str | tuple[int, ...] | tuple[Message, ...],
    context: RequestContext,
    sampling: SamplingParams,
    max_tokens: int | None,
    continue_final_message: bool = False,
    fold_system: bool = False,
) -> GenerateRequest:
    return GenerateRequest(
        context=context,
        prompt=prompt,
        sampling=sampling,
        max_tokens=max_tokens,
        min_tokens=shape.min_tokens,
        stop_token_ids=frozenset(shape.stop_token_ids),
        ignore_eos=shape.ignore_eos,
        stop_strings=tuple(shape.stop),
        n=shape.n,
        model=shape.model,
        continue_final_message=continue_final_message,
        fold_system=fold_system,
        truncate=shape.truncation == "auto",
        keep_for=_keep_for(shape),
    )


def _keep_for(shape: Body) -> float | None:
    if shape.prompt_cache_retention is None:
        return shape.keep_for
    if shape.keep_for is not None:
        raise InvalidRequest("keep_for and prompt_cache_retention say the same; send one", field="keep_for")
    return MAX_KEEP_SECONDS


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Let refusals that leave the block call fields what the caller calls them."""
    try:
        yield
    except InvalidRequest as error:
        if error.field is None or error.field not in names:
            raise
        name = names[error.field]
        raise type(error)(error.message.replace(error.field, name), field=name) from error


def _names(shape: Body) -> dict[str, str]:
    names = {"session": "prompt_cache_key"}
    return names if shape.prompt_cache_retention is None else names | {"keep_for": "prompt_cache_retention"}


def _asked(shape: Body, requests: tuple[GenerateRequest, ...], names: Mapping[str, str]) -> Asked:
    """Check every range, then tell the form of the answer."""
    with naming(names):
        for request in requests:
            check_request(request)
    if shape.stream_options is not None and not shape.stream:
        raise InvalidRequest("stream_options needs stream to be true", field="stream_options")
    options = shape.stream_options
    every = options is not None and options.continuous_usage_stats
    return Asked(
        requests=requests,
        stream=shape.stream,
        usage_at_end=every or (options is not None and options.include_usage),
        usage_on_every_chunk=every,
        names=names,
    )
