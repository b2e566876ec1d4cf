"""Messages that more than one service speaks, both ways."""

from __future__ import annotations

import secrets

from google.protobuf.duration_pb2 import Duration

from twostroke import limits
from twostroke.errors import FormatMismatch, InvalidRequest
from twostroke.kv.format import KvFormat
from twostroke.types import (
    CachedTokens,
    CachePolicy,
    FinishReason,
    Priority,
    RequestContext,
    SamplingParams,
    StopConditions,
    Token,
    Usage,
)
from twostroke.v1 import common_pb2

_PRIORITY = {
    common_pb2.PRIORITY_INTERACTIVE: Priority.INTERACTIVE,
    common_pb2.PRIORITY_STANDARD: Priority.STANDARD,
    common_pb2.PRIORITY_BATCH: Priority.BATCH,
}
_POLICY = {
    common_pb2.CACHE_POLICY_READ_WRITE: CachePolicy.READ_WRITE,
    common_pb2.CACHE_POLICY_READ_ONLY: CachePolicy.READ_ONLY,
    common_pb2.CACHE_POLICY_BYPASS: CachePolicy.BYPASS,
}
_FINISH = {
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}
_PRIORITY_PB = {value: key for key, value in _PRIORITY.items()}
_POLICY_PB = {value: key for key, value in _POLICY.items()}
_FINISH_PB = {value: key for key, value in _FINISH.items()}


def draw_seed() -> int:
    """A fresh seed; 53 bits, so that it survives a JSON number."""
    return secrets.randbits(53)


def priority(message: common_pb2.Priority.ValueType) -> Priority:
    """Read a priority; unspecified means standard. Raises InvalidRequest for one we do not know."""
    if message == common_pb2.PRIORITY_UNSPECIFIED:
        return Priority.STANDARD
    if message not in _PRIORITY:
        raise InvalidRequest(f"unknown priority {message}", field="priority")
    return _PRIORITY[message]


def priority_pb(value: Priority) -> common_pb2.Priority.ValueType:
    """Write a priority."""
    return _PRIORITY_PB[value]


def cache_policy(message: common_pb2.CachePolicy.ValueType) -> CachePolicy:
    """Read a cache policy; unspecified means read-write. Raises InvalidRequest for one we do not know."""
    if message == common_pb2.CACHE_POLICY_UNSPECIFIED:
        return CachePolicy.READ_WRITE
    if message not in _POLICY:
        raise InvalidRequest(f"unknown cache policy {message}", field="cache_policy")
    return _POLICY[message]


def cache_policy_pb(value: CachePolicy) -> common_pb2.CachePolicy.ValueType:
    """Write a cache policy."""
    return _POLICY_PB[value]


def context(message: common_pb2.RequestContext) -> RequestContext:
    """Read a request context."""
    if not 1 <= len(message.request_id) <= limits.MAX_NAME_CHARACTERS:
        raise InvalidRequest("context.request_id must have 1 to 128 characters", field="context.request_id")
    if message.attempt < 1:
        raise InvalidRequest("context.attempt counts from 1", field="context.attempt")
    return RequestContext(
        request_id=message.request_id,
        attempt=message.attempt,
        tenant=message.tenant or "default",
        namespace=message.namespace or "default",
        priority=priority(message.priority),
        cache_policy=cache_policy(message.cache_policy),
        session=message.session if message.HasField("session") else None,
        salt=message.salt,
    )


def context_pb(value: RequestContext) -> common_pb2.RequestContext:
    """Write a request context."""
    return common_pb2.RequestContext(
        request_id=value.request_id,
        attempt=value.attempt,
        tenant=value.tenant,
        namespace=value.namespace,
        priority=priority_pb(value.priority),
        cache_policy=cache_policy_pb(value.cache_policy),
        session=value.session,
        salt=value.salt,
    )


def sampling(message: common_pb2.SamplingParams, *, seed: int | None = None) -> SamplingParams:
    """Read and check sampling parameters; `seed` stands in for an absent one."""
    given = {
        name: getattr(message, name)
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "logprobs",
        )
        if message.HasField(name)
    }
    if not message.HasField("seed") and seed is None:
        raise InvalidRequest("sampling.seed must be set between services", field="sampling.seed")
    value = SamplingParams(
        **given,
        seed=message.seed if message.HasField("seed") else seed or 0,
        logit_bias=dict(message.logit_bias),
    )
    limits.check_sampling(value)
    return value


def sampling_pb(value: SamplingParams) -> common_pb2.SamplingParams:
    """Write sampling parameters."""
    return common_pb2.SamplingParams(
        temperature=value.temperature,
        top_k=value.top_k,
        top_p=value.top_p,
        min_p=value.min_p,
        presence_penalty=value.presence_penalty,
        frequency_penalty=value.frequency_penalty,
        repetition_penalty=value.repetition_penalty,
        logit_bias=dict(value.logit_bias),
        seed=value.seed,
        logprobs=value.logprobs,
    )


def stops(message: common_pb2.StopConditions) -> StopConditions:
    """Read the stop conditions that one service gives another; max_tokens is fixed by then."""
    if not 1 <= message.max_tokens <= limits.MAX_TOKENS:
        raise InvalidRequest("stops.max_tokens must be set between services", field="stops.max_tokens")
    if len(message.stop_token_ids) > limits.MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(f"at most {limits.MAX_STOP_TOKEN_IDS} stop_token_ids", field="stop_token_ids")
    return StopConditions(
        max_tokens=message.max_tokens,
        min_tokens=min(message.min_tokens, message.max_tokens),
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )


def stops_pb(value: StopConditions) -> common_pb2.StopConditions:
    """Write stop conditions."""
    return common_pb2.StopConditions(
        max_tokens=value.max_tokens,
        min_tokens=value.min_tokens,
        stop_token_ids=sorted(value.stop_token_ids),
        ignore_eos=value.ignore_eos,
    )


def token(message: common_pb2.Token) -> Token:
    """Read a token."""
    return Token(
        message.id,
        message.logprob if message.HasField("logprob") else None,
        tuple((each.id, each.logprob) for each in message.top),
    )


def token_pb(value: Token) -> common_pb2.Token:
    """Write a token."""
    if value.logprob is None:
        return common_pb2.Token(id=value.id)
    top = [common_pb2.TokenLogprob(id=each, logprob=logprob) for each, logprob in value.top]
    return common_pb2.Token(id=value.id, logprob=value.logprob, top=top)


def finish(reason: common_pb2.FinishReason.ValueType) -> FinishReason:
    """Read a finish reason. Raises InvalidRequest for one we do not know."""
    if reason not in _FINISH:
        raise InvalidRequest(f"unknown finish reason {reason}", field="finish")
    return _FINISH[reason]


def finish_pb(reason: FinishReason) -> common_pb2.FinishReason.ValueType:
    """Write a finish reason; only those of a choice that ended well cross the wire."""
    return _FINISH_PB[reason]


def kv_format(message: common_pb2.KvFormat) -> KvFormat:
    """Read a KvFormat and check that its digest is that of its fields."""
    value = KvFormat(
        model=message.model,
        weights_digest=message.weights_digest,
        weight_mode=message.weight_mode,
        layers=message.layers,
        kv_heads=message.kv_heads,
        head_dim=message.head_dim,
        block_tokens=message.block_tokens,
        dtype=message.dtype,
        rope_digest=message.rope_digest,
        adapter=message.adapter,
        layout=message.layout,
        hash_scheme=message.hash_scheme,
    )
    if value.digest != message.digest:
        raise FormatMismatch("the digest is not that of the fields: another version encoded it", field="kv_format")
    return value


def kv_format_pb(value: KvFormat) -> common_pb2.KvFormat:
    """Write a KvFormat with its digest."""
    return common_pb2.KvFormat(
        digest=value.digest,
        hash_scheme=value.hash_scheme,
        model=value.model,
        weights_digest=value.weights_digest,
        weight_mode=value.weight_mode,
        adapter=value.adapter,
        layers=value.layers,
        kv_heads=value.kv_heads,
        head_dim=value.head_dim,
        block_tokens=value.block_tokens,
        layout=value.layout,
        dtype=value.dtype,
        rope_digest=value.rope_digest,
    )


def duration_pb(seconds: float) -> Duration:
    """Write a duration, to the nearest nanosecond."""
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def seconds(message: Duration) -> float:
    """Read a duration."""
    return message.ToNanoseconds() / 1e9


def usage(message: common_pb2.Usage) -> Usage:
    """Read usage."""
    return Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached=cached(message.cached),
        kept_blocks=message.kept_blocks if message.HasField("kept_blocks") else None,
    )


def usage_pb(value: Usage) -> common_pb2.Usage:
    """Write usage."""
    return common_pb2.Usage(
        prompt_tokens=value.prompt_tokens,
        completion_tokens=value.completion_tokens,
        cached=cached_pb(value.cached),
        kept_blocks=value.kept_blocks,
    )


def cached(message: common_pb2.CachedTokens) -> CachedTokens:
    """Read cached token counts."""
    return CachedTokens(local=message.local, store=message.store)


def cached_pb(value: CachedTokens) -> common_pb2.CachedTokens:
    """Write cached token counts."""
    return common_pb2.CachedTokens(local=value.local, store=value.store)
