"""Every bound on what a caller may ask for, checked in one place before any work.

Both doors and the workers call these checks, so a field means the same everywhere. Field names in errors are those of
the OpenAI API where it has the field.
"""

from __future__ import annotations

from collections.abc import Iterable

from twostroke.errors import InvalidRequest
from twostroke.types import CachePolicy, GenerateRequest, Message, SamplingParams

MAX_CHOICES = 16
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1_024
MAX_LOGPROBS = 20
MAX_MESSAGES = 4_096
MAX_NAME_CHARACTERS = 128  # request id, session, salt, model, message name
MAX_PROMPT_CHARACTERS = 8 << 20
MAX_TOKENS = 1 << 20  # far beyond any context; keeps arithmetic small
MAX_KEEP_SECONDS = 86_400.0
SEED_BITS = 64
MESSAGE_BYTES = 16 << 20  # gRPC messages, both ways; bulk data streams in far smaller pieces
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def check_request(request: GenerateRequest) -> None:
    """Raise InvalidRequest naming the first field that is out of its range. Needs no model."""
    context = request.context
    for field, name in (
        ("request_id", context.request_id),
        ("session", context.session or "-"),
        ("cache_salt", context.salt or "-"),
        ("model", request.model or "-"),
    ):
        _within(field, len(name), 1, MAX_NAME_CHARACTERS, unit="characters")
    check_sampling(request.sampling)
    if request.max_tokens is not None:
        _within("max_tokens", request.max_tokens, 1, MAX_TOKENS)
    _within("min_tokens", request.min_tokens, 0, request.max_tokens or MAX_TOKENS)
    _within("n", request.n, 1, MAX_CHOICES)
    _within("stop_token_ids", len(request.stop_token_ids), 0, MAX_STOP_TOKEN_IDS, unit="ids")
    _within("stop", len(request.stop_strings), 0, MAX_STOP_STRINGS, unit="strings")
    for stop in request.stop_strings:
        _within("stop", len(stop), 1, MAX_STOP_STRING_CHARACTERS, unit="characters")
    _check_prompt(request.prompt)
    if request.keep_for is not None:
        _within("keep_for", request.keep_for, 0, MAX_KEEP_SECONDS, above=True, unit="seconds")
        if context.cache_policy is CachePolicy.BYPASS:
            raise InvalidRequest("keep_for needs another cache_policy: bypass leaves nothing to keep", field="keep_for")


def check_sampling(sampling: SamplingParams) -> None:
    """Raise InvalidRequest naming the first sampling parameter that is out of its range."""
    _within("temperature", sampling.temperature, 0, 2)
    _within("top_k", sampling.top_k, 0, MAX_TOKENS)
    _within("top_p", sampling.top_p, 0, 1, above=True)
    _within("min_p", sampling.min_p, 0, 1)
    _within("presence_penalty", sampling.presence_penalty, -2, 2)
    _within("frequency_penalty", sampling.frequency_penalty, -2, 2)
    _within("repetition_penalty", sampling.repetition_penalty, 0.01, 10)
    _within("seed", sampling.seed, 0, (1 << SEED_BITS) - 1)
    _within("logit_bias", len(sampling.logit_bias), 0, MAX_LOGIT_BIAS, unit="entries")
    for bias in sampling.logit_bias.values():
        _within("logit_bias", bias, -100, 100)
    if sampling.logprobs is not None:
        _within("top_logprobs", sampling.logprobs, 0, MAX_LOGPROBS)


def check_token_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise InvalidRequest when an id is outside the vocabulary."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{field}: token id {_shown(token)} is outside the vocabulary of {vocab_size}", field=field
            )


def _check_prompt(prompt: str | tuple[int, ...] | tuple[Message, ...]) -> None:
    if isinstance(prompt, str):
        _within("prompt", len(prompt), 1, MAX_PROMPT_CHARACTERS, unit="characters")
        return
    messages = [each for each in prompt if isinstance(each, Message)]
    if not messages:
        _within("prompt", len(prompt), 1, MAX_TOKENS, unit="tokens")
        return
    _within("messages", len(messages), 1, MAX_MESSAGES, unit="messages")
    _within("messages", sum(len(each.content) for each in messages), 0, MAX_PROMPT_CHARACTERS, unit="characters")
    for message in messages:
        if message.role not in ROLES:
            raise InvalidRequest(f"messages: role must be one of {', '.join(sorted(ROLES))}", field="messages")
        _within("messages", len(message.name or ""), 0, MAX_NAME_CHARACTERS, unit="characters in a name")


def _within(field: str, value: float, low: float, high: float, *, above: bool = False, unit: str = "") -> None:
    """`above` excludes the low end. NaN is outside every range."""
    if not low <= value <= high or (above and value == low):
        least = "over" if above else "from"
        bounds = f"{least} {_shown(low)} to {_shown(high)}{' ' + unit if unit else ''}"
        raise InvalidRequest(f"{field} must be {bounds}, not {_shown(value)}", field=field)


def _shown(number: float) -> str:
    """Short whatever a caller sends: JSON integers may have thousands of digits, which no float can hold."""
    if isinstance(number, float):
        return f"{number:g}"
    return str(number) if number.bit_length() <= SEED_BITS + 1 else f"an integer of {number.bit_length()} bits"
