"""Advice about the stored blocks of a prompt: both ways. Reading checks; it raises InvalidRequest."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from twostroke import limits
from twostroke.access.caller import Caller
from twostroke.types import Advised, GenerateRequest, RequestContext, SamplingParams
from twostroke.v1 import router_pb2
from twostroke.wire import common, generate


def stored_prompt(message: router_pb2.StoredPrompt, caller: Caller, keep_for: float | None = None) -> GenerateRequest:
    """Read whose blocks are meant: a request of which only the prompt matters. The namespace is the caller's."""
    request = GenerateRequest(
        context=RequestContext(
            request_id=generate.new_request_id(),
            tenant=caller.tenant,
            namespace=caller.namespace,
            salt=message.cache_salt,
        ),
        prompt=generate.prompt(message),
        continue_final_message=message.messages.continue_final_message,
        fold_system=message.messages.fold_system,
        sampling=SamplingParams(),
        model=message.model or "default",
        keep_for=keep_for,
    )
    limits.check_request(request)
    return request


def stored_prompt_pb(request: GenerateRequest) -> router_pb2.StoredPrompt:
    """Write whose blocks are meant."""
    message = router_pb2.StoredPrompt(model=request.model, cache_salt=request.context.salt)
    generate.write_prompt(request, message)
    return message


def advised(message: router_pb2.Advised, keep_for: Duration | None = None) -> Advised:
    """Read what an advice was good for."""
    return Advised(
        model=message.model,
        prompt_tokens=message.prompt_tokens,
        prompt_blocks=message.prompt_blocks,
        blocks=message.blocks,
        keep_for=None if keep_for is None else common.seconds(keep_for),
    )


def advised_pb(value: Advised) -> router_pb2.Advised:
    """Write what an advice was good for; the time that was granted stands beside it."""
    return router_pb2.Advised(
        model=value.model,
        prompt_tokens=value.prompt_tokens,
        prompt_blocks=value.prompt_blocks,
        blocks=value.blocks,
    )
