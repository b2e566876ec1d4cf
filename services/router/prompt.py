"""From what a caller sent to what the cluster runs: token ids, block keys, and limits that fit the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.router.fleet import ServedModel
from twostroke import limits
from twostroke.errors import ContextTooLong, InvalidRequest, NotFound
from twostroke.kv.keys import block_keys, request_root
from twostroke.text.segment import Segment
from twostroke.types import GenerateRequest, Message, StopConditions

_SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request in tokens."""

    ids: tuple[int, ...]
    root: bytes  # the parent of its first block
    block_tokens: int
    keys: tuple[bytes, ...]  # of its full blocks
    stops: StopConditions
    truncated_tokens: int = 0

    def keys_with(self, emitted: Sequence[int]) -> tuple[bytes, ...]:
        """Keys of the full blocks that there are once a choice has emitted so many; of its last token nothing is."""
        rest = (*self.ids[len(self.keys) * self.block_tokens :], *emitted[:-1])
        return (*self.keys, *block_keys(self.keys[-1] if self.keys else self.root, rest, self.block_tokens))


def prepare(model: ServedModel, request: GenerateRequest) -> Prompt:
    """Tokenize and check against the model. Blocking: long prompts take milliseconds, so it runs in a thread.

    Raises: NotFound, another model; InvalidRequest, naming the field; ContextTooLong.
    """
    if request.model not in ("default", model.info.id):
        raise NotFound(f"there is no model {request.model}; this cluster serves {model.info.id}", field="model")
    ids = whole = _token_ids(model, request)
    if request.truncate:
        ids = _truncated(model, request, whole)
    limits.check_token_ids("logit_bias", request.sampling.logit_bias, model.info.vocab_size)
    limits.check_token_ids("stop_token_ids", request.stop_token_ids, model.info.vocab_size)
    room = model.info.context_tokens - len(ids)
    if room < 1:
        raise ContextTooLong(
            f"the prompt has {len(ids)} tokens; the context of {model.info.context_tokens} must hold at least one more",
            field="messages" if _is_conversation(request) else "prompt",
        )
    if (request.max_tokens or 1) > room:
        raise ContextTooLong(
            f"the prompt has {len(ids)} tokens and max_tokens is {request.max_tokens}; the context holds"
            f" {model.info.context_tokens}, so max_tokens may be at most {room}",
            field="max_tokens",
        )
    stops = StopConditions(
        max_tokens=request.max_tokens or room,
        min_tokens=min(request.min_tokens, request.max_tokens or room),
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
    )
    root, block_tokens = request_root(model.kv_format.digest, request.context), model.kv_format.block_tokens
    return Prompt(
        ids=ids,
        root=root,
        block_tokens=block_tokens,
        keys=tuple(block_keys(root, ids, block_tokens)),
        stops=stops,
        truncated_tokens=len(whole) - len(ids),
    )


def _truncated(model: ServedModel, request: GenerateRequest, ids: tuple[int, ...]) -> tuple[int, ...]:
    """The newest part of a prompt that leaves room for max_tokens; all of it where even that does not fit."""
    most = model.info.context_tokens - (request.max_tokens or 1)
    if len(ids) <= most or most < 1:
        return ids
    turns = [each for each in request.prompt if isinstance(each, Message)]
    if not turns:
        return ids[-most:]
    # A conversation may begin anew at each later user turn: the earliest beginning that fits is searched by halves.
    starts = [at for at, turn in enumerate(turns) if turn.role == "user" and at] or [len(turns) - 1]
    fitting, low, high = ids, 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        kept = tuple(turn for at, turn in enumerate(turns) if at >= starts[middle] or turn.role in _SYSTEM_ROLES)
        candidate = _token_ids(model, replace(request, prompt=kept))
        if len(candidate) <= most:
            fitting, high = candidate, middle
        else:
            low = middle + 1
    return fitting


def _is_conversation(request: GenerateRequest) -> bool:
    return not isinstance(request.prompt, str) and isinstance(request.prompt[0], Message)


def _token_ids(model: ServedModel, request: GenerateRequest) -> tuple[int, ...]:
    if isinstance(request.prompt, str):
        # A raw prompt is the caller's own template: names of control tokens in it are control tokens.
        ids = tuple(model.tokenizer.encode_prompt([Segment(request.prompt, True)]))
    elif turns := [_turn(each) for each in request.prompt if isinstance(each, Message)]:
        template = model.require_template()
        segments = template.render(
            turns, continue_final_message=request.continue_final_message, fold_system=request.fold_system
        )
        ids = tuple(model.tokenizer.encode_prompt(segments))
    else:
        ids = tuple(each for each in request.prompt if isinstance(each, int))
        limits.check_token_ids("prompt", ids, model.info.vocab_size)
    if not ids:
        raise InvalidRequest("the prompt has no tokens", field="prompt")
    return ids


def _turn(message: Message) -> dict[str, object]:
    """A message as templates know it: `developer` is the newer name of `system`."""
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, object] = {"role": role, "content": message.content}
    return turn if message.name is None else {**turn, "name": message.name}
