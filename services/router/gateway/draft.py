"""An answer in the making: what both endpoints and both forms of answer keep track of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.router.gateway.json_text import Json
from services.router.gateway.parse import Asked
from twostroke.errors import Internal
from twostroke.types import CachedTokens, ChoiceFinished, Delta, FinishReason, Started, Token, Usage


@dataclass(slots=True)
class Choice:
    """One choice so far."""

    index: int
    text: list[str] = field(default_factory=list)
    unshown: list[Token] = field(default_factory=list)  # tokens whose log-probabilities no chunk carried yet
    shown_characters: int = 0  # characters begun by the tokens before those
    total_tokens: int = 0
    reason: FinishReason | None = None


class Form(Protocol):
    """What differs in JSON between chat and plain completions."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def opening(self) -> Json | None:
        """Members of the chunk that opens a choice, where the API has one."""

    def piece(self, text: str) -> Json:
        """Members of a chunk that carries text."""

    def closing(self) -> Json:
        """Members of the chunk that carries the finish reason."""

    def whole(self, text: str) -> Json:
        """Members of a choice that is sent in one piece."""

    def logprobs(self, choice: Choice) -> Json:
        """Log-probabilities of the tokens not shown yet, at least one."""


class Draft:
    """Gathers the events of all prompts, and writes the JSON objects around them.

    Args:
        asked: what the caller wants.
        form: the endpoint's JSON.
        request_id: part of the answer's id.
        created: Unix time in seconds.
    """

    def __init__(self, asked: Asked, form: Form, *, request_id: str, created: int) -> None:
        self._asked = asked
        self._form = form
        self._request_id = request_id
        self._created = created
        self._started: Sequence[Started] = ()
        self._usages: list[Usage] = []
        self.choices = [Choice(index) for index in range(asked.choices)]

    def begin(self, started: Sequence[Started]) -> None:
        """All prompts were found valid."""
        self._started = started

    @property
    def headers(self) -> dict[str, str]:
        """What the caller needs to get the same answer again."""
        return {"x-twostroke-seed": str(self._started[0].seed)}

    def add(self, prompt: int, delta: Delta) -> Choice:
        """Take a delta into its choice; its text is the caller's to keep or to send."""
        choice = self._choice(prompt, delta.choice)
        choice.total_tokens = delta.total_tokens
        choice.unshown.extend(token for token in delta.tokens if token.logprob is not None)
        return choice

    def finish(self, prompt: int, finished: ChoiceFinished) -> Choice:
        """Note why a choice ended."""
        choice = self._choice(prompt, finished.choice)
        choice.reason = finished.reason
        return choice

    def count(self, usage: Usage) -> None:
        """Note the usage of one prompt."""
        self._usages.append(usage)

    def check_complete(self) -> None:
        """Raise Internal when the events ended before the answer did."""
        if len(self._usages) != len(self._asked.requests) or any(each.reason is None for each in self.choices):
            raise Internal("the events ended before the answer was complete")

    def chunk(self, choices: list[Json]) -> Json:
        """An object of the stream. With usage asked for, all but the last say null."""
        chunk = self._envelope(self._form.chunk_object) | {"choices": choices}
        if self._asked.usage_on_every_chunk:
            chunk["usage"] = self._running_usage()
        elif self._asked.usage_at_end:
            chunk["usage"] = None
        return chunk

    def last_chunk(self) -> Json:
        """The object that carries the usage of the whole request."""
        return self._envelope(self._form.chunk_object) | {"choices": [], "usage": self._usage()}

    def whole(self) -> Json:
        """The answer in one piece."""
        choices = [self.choice_json(each, self._form.whole("".join(each.text))) for each in self.choices]
        return self._envelope(self._form.whole_object) | {"choices": choices, "usage": self._usage()}

    def choice_json(self, choice: Choice, members: Json) -> Json:
        """One choice of a chunk or of the whole answer, with the log-probabilities that were not shown yet."""
        logprobs = self._form.logprobs(choice) if choice.unshown else None
        choice.unshown.clear()
        reason = choice.reason.value if choice.reason else None
        return {"index": choice.index, **members, "logprobs": logprobs, "finish_reason": reason}

    def _choice(self, prompt: int, index: int) -> Choice:
        return self.choices[prompt * self._asked.requests[0].n + index]

    def _envelope(self, kind: str) -> Json:
        return {
            "id": self._form.id_prefix + self._request_id,
            "object": kind,
            "created": self._created,
            "model": self._started[0].model,
            "system_fingerprint": self._started[0].fingerprint,
        }

    def _running_usage(self) -> Json:
        prompt = sum(each.prompt_tokens for each in self._started)
        return _counts(prompt, sum(each.total_tokens for each in self.choices))

    def _usage(self) -> Json:
        cached = CachedTokens(
            local=sum(each.cached.local for each in self._usages), store=sum(each.cached.store for each in self._usages)
        )
        counts = _counts(
            sum(each.prompt_tokens for each in self._usages), sum(each.completion_tokens for each in self._usages)
        )
        details = {"cached_tokens": cached.total, "local_tokens": cached.local, "store_tokens": cached.store}
        if truncated := sum(each.truncated_tokens for each in self._started):
            details["truncated_tokens"] = truncated
        kept = [each.kept_blocks for each in self._usages if each.kept_blocks is not None]
        if kept:
            details["kept_blocks"] = sum(kept)
        return counts | {"prompt_tokens_details": details}


def _counts(prompt: int, completion: int) -> Json:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
