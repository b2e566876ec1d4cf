"""Log-probabilities in the two shapes of the OpenAI API.

Tokens are named by their bytes, each on its own: joining the `bytes` of all positions gives the exact UTF-8 of the
text, also where a character spans several tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.router.gateway.json_text import Json
from twostroke.types import Token

TokenBytes = Callable[[int], bytes]

LEAST = -9_999.0  # JSON has no infinity; the API uses this number for tokens that are out of the question


def token_name(data: bytes) -> str:
    r"""The token as text, or `bytes:\xf0\x9f` where it is only a part of a character. Empty for a control token."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def characters(data: bytes) -> int:
    """How many characters start in this piece of UTF-8."""
    return sum(byte & 0xC0 != 0x80 for byte in data)


def chat_logprobs(tokens: Sequence[Token], token_bytes: TokenBytes) -> Json:
    """The `logprobs` of a chat choice."""

    def entry(token_id: int, logprob: float) -> Json:
        data = token_bytes(token_id)
        return {"token": token_name(data), "logprob": max(logprob, LEAST), "bytes": list(data)}

    content = [
        entry(token.id, token.logprob) | {"top_logprobs": [entry(*each) for each in token.top]}
        for token in tokens
        if token.logprob is not None
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[Token], token_bytes: TokenBytes, start: int) -> Json:
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
        data = token_bytes(token.id)
        names.append(token_name(data))
        logprobs.append(max(token.logprob, LEAST))
        ranked = [*token.top, (token.id, token.logprob)]
        tops.append({token_name(token_bytes(each)): max(logprob, LEAST) for each, logprob in ranked})
        continues = bool(data) and data[0] & 0xC0 == 0x80  # inside a character that an earlier token started
        offsets.append(max(0, start - continues))
        start += characters(data)
    return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
