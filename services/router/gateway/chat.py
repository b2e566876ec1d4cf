"""The JSON of chat completions."""

from __future__ import annotations

from services.router.gateway.draft import Choice
from services.router.gateway.json_text import Json
from services.router.gateway.logprobs import Vocabulary, chat_logprobs


class ChatForm:
    """POST /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def opening(self) -> Json | None:
        """The role; the only chunk with empty content."""
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, text: str) -> Json:
        """Content."""
        return {"delta": {"content": text}}

    def closing(self) -> Json:
        """Nothing but what stands beside it."""
        return {"delta": {}}

    def whole(self, text: str) -> Json:
        """A message."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, choice: Choice) -> Json:
        """Entries with raw bytes."""
        return chat_logprobs(choice.unshown, self._vocabulary)
