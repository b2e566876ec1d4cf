"""Detokenizer: token ids to text as they come, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from twostroke.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns one stream of token ids into text.

    Bytes wait until their character is complete. What can no longer become one is U+FFFD at once (the replacement rule
    of the Unicode standard, section 3.9, as Python's decoder has it); what is still open at the end is one U+FFFD.
    The joined text is that of all ids decoded at once, however they were split.
    """

    def __init__(self, tokenizer: Tokenizer, *, after_text: bool) -> None:
        """Start a stream.

        With `after_text` the ids follow a prompt, so a leading space is theirs. Otherwise they stand alone, and the
        space that SentencePiece puts before a text is dropped, as in `Tokenizer.decode`.
        """
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drops_space = tokenizer.bundle.strips_leading_space and not after_text

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; control tokens have none."""
        raw = b"".join(map(self._tokenizer.token_bytes, ids))
        if self._drops_space and raw:
            raw, self._drops_space = raw.removeprefix(b" "), False
        return self._utf8.decode(raw)

    def finish(self) -> str:
        """What is left at the end of the stream: nothing, or U+FFFD for a character cut short."""
        return self._utf8.decode(b"", final=True)
