"""What a request must satisfy before the engine takes it: nothing a caller sends may fail a step for others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from twostroke.engine.sequence import EngineRequest
from twostroke.errors import ContextTooLong, InvalidRequest
from twostroke.limits import MAX_CHOICES, check_sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What fits this engine."""

    vocab_size: int
    context: int  # tokens of prompt and answer together
    page_tokens: int
    pages: int  # that can be given out

    def check(self, request: EngineRequest) -> None:
        """Accept a request, or say what is wrong with it.

        Raises:
            InvalidRequest: a field is out of its range; `field` names it.
            ContextTooLong: the tokens do not fit the model's context, or could outgrow the page pool.
        """
        if not request.prompt:
            raise InvalidRequest("the prompt is empty", field="prompt")
        for name, ids in (
            ("prompt", request.prompt),
            ("emitted", request.emitted),
            ("stop_token_ids", request.stops.stop_token_ids),
            ("logit_bias", request.sampling.logit_bias),
        ):
            self._check_ids(name, ids)
        _check_stops(request)
        _check_choices(request)
        check_sampling(request.sampling)
        self._check_length(request)

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        lowest, highest = min(ids, default=0), max(ids, default=0)
        if lowest < 0 or highest >= self.vocab_size:
            raise InvalidRequest(f"{name} holds a token outside the vocabulary of {self.vocab_size}", field=name)

    def _check_length(self, request: EngineRequest) -> None:
        prompt, given = len(request.prompt), len(request.prompt) + len(request.emitted)
        if prompt >= self.context or given > self.context:
            message = f"the prompt has {prompt} tokens and leaves no room in a context of {self.context}"
            raise ContextTooLong(message, field="prompt")
        longest = min(prompt + request.stops.max_tokens, self.context) - 1  # the last token is never run
        if request.first_token_only:
            longest = min(given, longest)
        room = self.pages * self.page_tokens
        if longest > room:
            field = "prompt" if given >= room else "max_tokens"
            raise ContextTooLong(f"{longest} tokens need memory for as many; there is room for {room}", field=field)


def _check_stops(request: EngineRequest) -> None:
    stops = request.stops
    if stops.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {stops.max_tokens}; it must be at least 1", field="max_tokens")
    if not 0 <= stops.min_tokens <= stops.max_tokens:
        message = f"min_tokens is {stops.min_tokens}; it must lie between 0 and max_tokens, {stops.max_tokens}"
        raise InvalidRequest(message, field="min_tokens")
    if request.max_uncached is not None and request.max_uncached < 0:
        raise InvalidRequest("max_uncached must not be negative", field="max_uncached")


def _check_choices(request: EngineRequest) -> None:
    most = MAX_CHOICES if request.first_token_only else 1
    if not 1 <= len(request.choices) <= most or min(request.choices) < 0:
        raise InvalidRequest(f"{len(request.choices)} choices are given; 1 to {most} are possible", field="n")
