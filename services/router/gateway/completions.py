"""The JSON of plain completions."""

from __future__ import annotations

from services.router.gateway.draft import Choice
from services.router.gateway.json_text import Json
from services.router.gateway.logprobs import Vocabulary, characters, completion_logprobs


class CompletionForm:
    """POST /v1/completions."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def opening(self) -> Json | None:
        """Nothing: a choice opens with its first text."""
        return None

    def piece(self, text: str) -> Json:
        """Text."""
        return {"text": text}

    def closing(self) -> Json:
        """The API wants the member, so it is empty here and only here."""
        return {"text": ""}

    def whole(self, text: str) -> Json:
        """Text."""
        return {"text": text}

    def logprobs(self, choice: Choice) -> Json:
        """Parallel lists, with offsets that go on over the chunks of a stream."""
        start = choice.shown_characters
        choice.shown_characters += sum(characters(self._vocabulary.token_bytes(token.id)) for token in choice.unshown)
        return completion_logprobs(choice.unshown, self._vocabulary, start)
