"""Log-probabilities in the two shapes of the OpenAI API.

Tokens are named by their bytes, each on its own: joining the `bytes` of all positions gives the exact UTF-8 of the
text, also where a character spans several tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.router.gateway.json_text import Json
from twostroke.types import Token

LEAST = -9_999.0  # JSON has no infinity; the API uses this number for tokens that are out of the question


class Vocabulary(Protocol):
    """What tokens stand for."""

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of a token; none for a control token."""

    def control_name(self, token_id: int) -> str | None:
        """What templates call a control token; None for every other token."""


def token_name(vocabulary: Vocabulary, token_id: int) -> str:
    r"""A name that is never empty.

    It is the token's text, `bytes:\xf0\x9f` where that is only a part of a character, or the name of a control token.
    """
    data = vocabulary.token_bytes(token_id)
    if not data:
        return vocabulary.control_name(token_id) or f"token_id:{token_id}"
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def characters(data: bytes) -> int:
    """How many characters start in this piece of UTF-8."""
    return sum(byte & 0xC0 != 0x80 for byte in data)


def chat_logprobs(tokens: Sequence[Token], vocabulary: Vocabulary) -> Json:
    """The `logprobs` of a chat choice."""

    def entry(token_id: int, logprob: float) -> Json:
        name, data = token_name(vocabulary, token_id), vocabulary.token_bytes(token_id)
        return {"token": name, "logprob": max(logprob, LEAST), "bytes": list(data)}

    content = [
        entry(token.id, token.logprob) | {"top_logprobs": [entry(*each) for each in token.top]}
        for token in tokens
        if token.logprob is not None
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[Token], vocabulary: Vocabulary, start: int) -> Json:
    """The `logprobs` of a completion choice.

    `start` counts the characters that earlier tokens of this choice began: offsets are in characters from the start of
    the answer.
    """
    names: list[str] = []
    logprobs: list[float] = []
    tops: list[dict[str, float]] = []
    offsets: list[int] = []
    for token in tokens:
        if token.logprob is None:
            continue
        data = vocabulary.token_bytes(token.id)
        names.append(token_name(vocabulary, token.id))
        logprobs.append(max(token.logprob, LEAST))
        tops.append(_ranked([*token.top, (token.id, token.logprob)], vocabulary))
        continues = bool(data) and data[0] & 0xC0 == 0x80  # inside a character that an earlier token started
        offsets.append(max(0, start - continues))
        start += characters(data)
    return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def _ranked(alternatives: Sequence[tuple[int, float]], vocabulary: Vocabulary) -> dict[str, float]:
    """By name; of two tokens with the same text the more likely one, which comes first."""
    ranked: dict[str, float] = {}
    for token_id, logprob in alternatives:
        ranked.setdefault(token_name(vocabulary, token_id), max(logprob, LEAST))
    return ranked
