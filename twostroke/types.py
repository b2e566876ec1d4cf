"""Value types that every part of the house shares; plain data, no behaviour, no protobuf."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

NO_BIAS: Mapping[int, float] = MappingProxyType({})


class FinishReason(enum.Enum):
    """Why a choice ended. The values are the words of the OpenAI API where it has one."""

    STOP = "stop"  # an end token, a stop token id or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    CANCELLED = "cancelled"  # the caller left
    ERROR = "error"  # a typed error ended the request


class Priority(enum.IntEnum):
    """Scheduling class; a lower number is served first."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2


class CachePolicy(enum.Enum):
    """What a request may do with cached attention blocks."""

    READ_WRITE = "read_write"  # use what is stored, store what is computed
    READ_ONLY = "read_only"  # use what is stored, store nothing
    BYPASS = "bypass"  # share nothing with any other request

    @property
    def stores(self) -> bool:
        """Whether what is computed stays in the store for others."""
        return self is CachePolicy.READ_WRITE


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """Who asks, on whose behalf, and which try this is. Travels with a request through every hop."""

    request_id: str
    attempt: int = 1
    tenant: str = "default"
    namespace: str = "default"
    priority: Priority = Priority.STANDARD
    cache_policy: CachePolicy = CachePolicy.READ_WRITE
    session: str | None = None
    salt: str = ""  # the caller's cache salt: narrows the namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen from the logits.

    The order is: repetition penalty, presence and frequency penalties, logit bias, bans (`min_tokens`), temperature,
    top-k, top-p, min-p, then Gumbel-max with noise keyed by (seed, choice, position, token id).
    """

    temperature: float = 1.0  # 0 means greedy: the highest logit after penalties and bias
    top_k: int = 0  # 0 means off
    top_p: float = 1.0  # 1 means off
    min_p: float = 0.0  # 0 means off; relative to the most likely token
    presence_penalty: float = 0.0  # subtracted once from tokens generated so far
    frequency_penalty: float = 0.0  # subtracted per occurrence among the tokens generated so far
    repetition_penalty: float = 1.0  # divides positive and multiplies negative logits of prompt and generated tokens
    logit_bias: Mapping[int, float] = field(default_factory=lambda: NO_BIAS)  # token id -> added to its logit
    seed: int = 0  # unsigned 64 bits
    logprobs: int | None = None  # None means none; k >= 0 adds the k most likely alternatives of each token


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConditions:
    """When a choice ends, in tokens. Stop strings are text and live in the router."""

    max_tokens: int  # tokens to generate, counted from the end of the prompt
    min_tokens: int = 0  # end and stop tokens are banned before this many
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False  # the model's own end tokens are ordinary tokens


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token; log-probabilities come from the raw logits (natural log), when asked for."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), most likely first


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedTokens:
    """Prompt tokens that were not computed, split by where their keys and values came from."""

    local: int = 0  # the prefill worker's own pages
    store: int = 0  # the KV block store's arena

    @property
    def total(self) -> int:
        """All prompt tokens that were not computed."""
        return self.local + self.store


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request: the prompt once, completions summed over choices (end tokens count)."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached: CachedTokens = field(default_factory=CachedTokens)
    kept_blocks: int | None = None  # of prompt and choices, kept by the store now; None where that was not asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation. `role` is system, developer, user, assistant or tool."""

    role: str
    content: str
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What a caller wants, whichever door it came through; the door draws a seed for an unseeded request."""

    context: RequestContext
    prompt: str | tuple[int, ...] | tuple[Message, ...]  # raw text, token ids, or a conversation
    sampling: SamplingParams
    max_tokens: int | None = None  # None: the room left in the context
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    stop_strings: tuple[str, ...] = ()
    n: int = 1
    model: str = "default"
    continue_final_message: bool = False  # the last message is the assistant's and is to be continued
    fold_system: bool = False  # put system messages into the next user turn, for templates that refuse the role
    truncate: bool = False  # drop the oldest of a prompt that does not fit, instead of refusing it
    keep_for: float | None = None  # seconds after its end for which its blocks shall be evicted last
    traceparent: str | None = None  # W3C trace context of the caller


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The first event of every answer; nothing was generated yet, and the request was found valid."""

    request_id: str
    model: str
    seed: int
    prompt_tokens: int
    fingerprint: str
    truncated_tokens: int = 0  # dropped from the start of the prompt, where that was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one choice got since its last delta: text that can be shown, and the tokens that came."""

    choice: int
    sequence: int
    text: str
    tokens: tuple[Token, ...]
    total_tokens: int


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """A choice ended."""

    choice: int
    reason: FinishReason


class Advice(enum.Enum):
    """What a caller may advise about the stored blocks of a prompt. Never a promise, and it changes no answer."""

    KEEP = "keep"  # evict them last, for a while
    RELEASE = "release"  # evict them first
    PREFETCH = "prefetch"  # bring them into memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Advised:
    """What an advice was good for."""

    model: str
    prompt_tokens: int
    prompt_blocks: int  # full ones
    blocks: int  # of these: the leading ones that are kept, or in memory, now; or those that will be evicted first
    keep_for: float | None = None  # seconds granted; None where nothing was


Event = Started | Delta | ChoiceFinished | Usage
