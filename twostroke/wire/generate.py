"""The generate contract of the router: requests in, events out, both ways."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from twostroke import limits
from twostroke.access.caller import Caller
from twostroke.errors import Internal, InvalidRequest
from twostroke.types import (
    ChoiceFinished,
    Delta,
    Event,
    GenerateRequest,
    Message,
    RequestContext,
    Started,
    StopConditions,
    Usage,
)
from twostroke.v1 import common_pb2, router_pb2
from twostroke.wire import common


def new_request_id() -> str:
    """A request id for a caller that gave none."""
    return f"req-{secrets.token_hex(12)}"


def generate_request(message: router_pb2.GenerateRequest, caller: Caller) -> GenerateRequest:
    """Read and check what a gRPC caller wants. Raises InvalidRequest and PermissionDenied naming the field."""
    if message.output not in router_pb2.Output.values():
        raise InvalidRequest(f"unknown output {message.output}", field="output")
    request = GenerateRequest(
        context=_context(message, caller),
        prompt=prompt(message),
        continue_final_message=message.messages.continue_final_message,
        fold_system=message.messages.fold_system,
        truncate=message.truncate,
        sampling=common.sampling(message.sampling, seed=common.draw_seed()),
        max_tokens=message.stops.max_tokens if message.stops.HasField("max_tokens") else None,
        min_tokens=message.stops.min_tokens,
        stop_token_ids=frozenset(message.stops.stop_token_ids),
        ignore_eos=message.stops.ignore_eos,
        stop_strings=tuple(message.stop_strings),
        n=message.n if message.HasField("n") else 1,
        model=message.model or "default",
        keep_for=common.seconds(message.keep_for) if message.HasField("keep_for") else None,
    )
    limits.check_request(request)
    return request


def _context(message: router_pb2.GenerateRequest, caller: Caller) -> RequestContext:
    """Tenant and namespace are those of the caller, and not for the message to choose."""
    if len(message.cache_salt) > limits.MAX_NAME_CHARACTERS:
        raise InvalidRequest(f"cache_salt has at most {limits.MAX_NAME_CHARACTERS} characters", field="cache_salt")
    unasked = message.priority == common_pb2.PRIORITY_UNSPECIFIED
    asked = None if unasked else common.priority(message.priority)
    return RequestContext(
        request_id=message.request_id or new_request_id(),
        tenant=caller.tenant,
        namespace=caller.namespace,
        priority=caller.priority(asked),
        cache_policy=common.cache_policy(message.cache_policy),
        session=message.session if message.HasField("session") else None,
        salt=message.cache_salt,
    )


def prompt(
    message: router_pb2.GenerateRequest | router_pb2.StoredPrompt,
) -> str | tuple[int, ...] | tuple[Message, ...]:
    """Read a prompt. Raises InvalidRequest, when there is none."""
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return tuple(message.token_ids.ids)
        case "messages":
            turns = message.messages.messages
            if not turns:
                raise InvalidRequest("messages must not be empty", field="messages")
            return tuple(Message(role=each.role, content=each.content, name=each.name or None) for each in turns)
        case _:
            raise InvalidRequest("prompt: one of text, messages, token_ids must be set", field="prompt")


@contextmanager
def writing() -> Iterator[None]:
    """Write a caller's message inside the block. Raises InvalidRequest for what protobuf refuses, as a negative id."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the request has a value that cannot be sent: {error}") from error


def generate_request_pb(request: GenerateRequest, *, output: router_pb2.Output.ValueType) -> router_pb2.GenerateRequest:
    """Write a request, as a client does."""
    message = router_pb2.GenerateRequest(
        request_id=request.context.request_id,
        model=request.model,
        sampling=common.sampling_pb(request.sampling),
        stops=common.stops_pb(
            StopConditions(
                max_tokens=request.max_tokens or 1,
                min_tokens=request.min_tokens,
                stop_token_ids=request.stop_token_ids,
                ignore_eos=request.ignore_eos,
            )
        ),
        stop_strings=request.stop_strings,
        n=request.n,
        priority=common.priority_pb(request.context.priority),
        cache_policy=common.cache_policy_pb(request.context.cache_policy),
        session=request.context.session,
        cache_salt=request.context.salt,
        output=output,
        truncate=request.truncate,
        keep_for=None if request.keep_for is None else common.duration_pb(request.keep_for),
    )
    if request.max_tokens is None:
        message.stops.ClearField("max_tokens")
    write_prompt(request, message)
    return message


def write_prompt(request: GenerateRequest, message: router_pb2.GenerateRequest | router_pb2.StoredPrompt) -> None:
    """Write a request's prompt into a message."""
    if isinstance(request.prompt, str):
        message.text = request.prompt
        return
    for each in request.prompt:
        if isinstance(each, Message):
            message.messages.messages.add(role=each.role, content=each.content, name=each.name or "")
        else:
            message.token_ids.ids.append(each)
    if message.WhichOneof("prompt") == "messages":
        message.messages.continue_final_message = request.continue_final_message
        message.messages.fold_system = request.fold_system


def event(message: router_pb2.GenerateResponse) -> Event:
    """Read an event."""
    match message.WhichOneof("event"):
        case "started":
            started = message.started
            return Started(
                request_id=started.request_id,
                model=started.model,
                seed=started.seed,
                prompt_tokens=started.prompt_tokens,
                fingerprint=started.system_fingerprint,
                truncated_tokens=started.truncated_tokens,
            )
        case "delta":
            delta = message.delta
            return Delta(
                choice=delta.choice,
                sequence=delta.sequence,
                text=delta.text,
                tokens=tuple(common.token(each) for each in delta.tokens),
                total_tokens=delta.total_tokens,
            )
        case "choice_finished":
            return ChoiceFinished(message.choice_finished.choice, common.finish(message.choice_finished.reason))
        case "usage":
            return common.usage(message.usage)
        case _:
            raise Internal("the router sent an event that this client does not know; update the client")


def event_pb(value: Event, *, output: router_pb2.Output.ValueType) -> router_pb2.GenerateResponse:
    """Write an event; deltas carry text, tokens or both."""
    match value:
        case Started():
            started = router_pb2.Started(
                request_id=value.request_id,
                model=value.model,
                seed=value.seed,
                prompt_tokens=value.prompt_tokens,
                system_fingerprint=value.fingerprint,
                truncated_tokens=value.truncated_tokens,
            )
            return router_pb2.GenerateResponse(started=started)
        case Delta():
            with_text = output != router_pb2.OUTPUT_TOKENS
            with_tokens = output in (router_pb2.OUTPUT_TOKENS, router_pb2.OUTPUT_TEXT_AND_TOKENS)
            delta = router_pb2.Delta(
                choice=value.choice,
                sequence=value.sequence,
                text=value.text if with_text else "",
                tokens=[common.token_pb(each) for each in value.tokens if with_tokens or each.logprob is not None],
                total_tokens=value.total_tokens,
            )
            return router_pb2.GenerateResponse(delta=delta)
        case ChoiceFinished():
            finished = router_pb2.ChoiceFinished(choice=value.choice, reason=common.finish_pb(value.reason))
            return router_pb2.GenerateResponse(choice_finished=finished)
        case Usage():
            return router_pb2.GenerateResponse(usage=common.usage_pb(value))
