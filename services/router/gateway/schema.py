"""The shapes of request bodies. Ranges are not checked here: `twostroke.limits` does that for both doors.

Lists are bounded here too, and end at their first fault: a list of a million faults would be a million errors.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, PlainValidator
from pydantic_core import PydanticCustomError

from twostroke.limits import MAX_MESSAGES, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS

Prompts = tuple[str | tuple[int, ...], ...]

MAX_PROMPTS = 64
MAX_PARTS = 1_024  # of one message


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _prompts(value: object) -> Prompts:
    """One text, one list of token ids, or a list of either kind, as the API has them."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("prompt", "must be text, token ids, or a list of either, and not empty")
    if _is_ids(value):
        return (tuple(value),)
    if len(value) > MAX_PROMPTS:
        raise PydanticCustomError("prompt", "at most {most} prompts in one request", {"most": MAX_PROMPTS})
    if all(isinstance(each, str) for each in value):
        return tuple(value)
    if all(isinstance(each, list) and _is_ids(each) for each in value):
        return tuple(tuple(each) for each in value)
    raise PydanticCustomError("prompt", "must be all text or all token ids")


def _is_ids(value: list[Any]) -> bool:
    return all(type(each) is int for each in value)  # True is an int to isinstance


class Shape(BaseModel):
    """Strict: no coercion, no unknown members."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(Shape):
    """What a stream says besides the text."""

    include_usage: bool = False  # one last chunk with the usage
    continuous_usage_stats: bool = False  # running counts on every chunk, and the last one too
    include_obfuscation: Literal[False] = False  # chunks are never padded


class TextPart(Shape):
    """A piece of a message; other kinds than text are refused."""

    type: Literal["text"]
    text: str


class ChatMessage(Shape):
    """One turn. Its parts are joined without anything between them."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart], Field(max_length=MAX_PARTS), FailFast(), BeforeValidator(_parts)]
    name: str | None = None


class Body(Shape):
    """The members that both endpoints have. None means absent."""

    model: str = "default"
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] = Field(default_factory=dict)
    seed: int | None = None
    stop: Annotated[list[str], Field(max_length=MAX_STOP_STRINGS), FailFast(), BeforeValidator(_listed)] = Field(
        default_factory=list
    )
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS), FailFast()] = Field(default_factory=list)
    ignore_eos: bool = False
    priority: Literal["interactive", "standard", "batch"] | None = None
    cache_policy: Literal["read_write", "read_only", "bypass"] = "read_write"
    cache_salt: str = ""
    truncation: Literal["auto", "disabled"] = "disabled"  # auto drops the oldest of a prompt that does not fit
    keep_for: float | None = None  # seconds after the answer for which its blocks shall be evicted last
    prompt_cache_retention: Literal["24h"] | None = None  # the API's name for the longest of it
    prompt_cache_key: str | None = None  # names the conversation: the session of usage records


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = None  # the newer name of max_tokens
    logprobs: bool = False
    top_logprobs: int | None = None
    continue_final_message: bool = False
    fold_system: bool = False  # system messages into the next user turn, for templates that refuse the role
    add_generation_prompt: bool | None = None  # follows from continue_final_message; may be said, not contradicted


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: Annotated[Prompts, PlainValidator(_prompts)]
    logprobs: int | None = None


class AdviceBody(Shape):
    """POST /v1/cache/keep, /release and /prefetch: what of a request decides which blocks it uses."""

    model: str = "default"
    messages: Messages = Field(default_factory=list)
    prompt: Annotated[Prompts, PlainValidator(_prompts)] = ()
    continue_final_message: bool = False
    fold_system: bool = False
    cache_salt: str = ""
    keep_for: float | None = None  # seconds; of keep alone


# Accepted and without effect: they describe the caller, or tools, which a request cannot have.
WITHOUT_EFFECT = frozenset({"user", "metadata", "store", "safety_identifier", "parallel_tool_calls"})

# Known to the API but not supported: refused unless they ask for what happens anyway.
COMMON_ONLY: dict[str, tuple[object, ...]] = {
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
}
CHAT_ONLY = COMMON_ONLY | {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
COMPLETION_ONLY = COMMON_ONLY | {"best_of": (1,), "echo": (False,), "suffix": ("",)}
MESSAGE_ONLY: dict[str, tuple[object, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}
