"""Advice about the stored blocks of a prompt: the JSON of POST /v1/cache/keep, /release and /prefetch."""

from __future__ import annotations

from services.router.gateway.json_text import Json
from services.router.gateway.parse import refuse_unsupported_messages, turns, validated
from services.router.gateway.schema import AdviceBody
from twostroke.access.caller import Caller
from twostroke.errors import InvalidRequest
from twostroke.limits import check_request
from twostroke.types import Advice, Advised, GenerateRequest, RequestContext, SamplingParams


def parse_advice(advice: Advice, body: Json, request_id: str, caller: Caller) -> GenerateRequest:
    """Read whose blocks are meant: a request of which only the prompt matters.

    Raises: InvalidRequest, naming the field.
    """
    refuse_unsupported_messages(body)
    shape = validated(AdviceBody, body)
    if advice is Advice.KEEP and shape.keep_for is None:
        raise InvalidRequest("keep_for is required", field="keep_for")
    if advice is not Advice.KEEP and shape.keep_for is not None:
        raise InvalidRequest("keep_for is not a known field", field="keep_for")
    if len(shape.prompt) + bool(shape.messages) != 1:
        raise InvalidRequest("one prompt, or messages instead, must be given", field="prompt")
    request = GenerateRequest(
        context=RequestContext(
            request_id=request_id, tenant=caller.tenant, namespace=caller.namespace, salt=shape.cache_salt
        ),
        prompt=turns(shape.messages) if shape.messages else shape.prompt[0],
        sampling=SamplingParams(),
        model=shape.model,
        continue_final_message=shape.continue_final_message,
        fold_system=shape.fold_system,
        keep_for=shape.keep_for,
    )
    check_request(request)
    return request


def advised_json(advice: Advice, value: Advised) -> Json:
    """What an advice was good for."""
    answer: Json = {
        "object": f"cache.{advice.value}",
        "model": value.model,
        "prompt_tokens": value.prompt_tokens,
        "prompt_blocks": value.prompt_blocks,
        "blocks": value.blocks,
    }
    return answer if value.keep_for is None else answer | {"keep_for": value.keep_for}
