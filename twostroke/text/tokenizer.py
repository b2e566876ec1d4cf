"""Tokenizer: text to token ids and back, over the `tokenizers` library.

Long texts belong in a thread: `encode` lets go of the interpreter lock while it works, through the library's batch call
with one text (its single call holds the lock and takes twice as long, tokenizers 0.23). A batch of one starts no
threads, so the library's own parallelism, and its trouble with forks, never comes up.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import tokenizers

from twostroke.errors import InvalidRequest, ModelError, TooLarge
from twostroke.limits import MAX_PROMPT_CHARACTERS
from twostroke.text.bundle import SEAL, ByteRule, TokenizerBundle, sealed_name
from twostroke.text.segment import Segment, any_of

MAX_TEXT_CHARACTERS = 2 * MAX_PROMPT_CHARACTERS  # a conversation with what its template adds


class Tokenizer:
    """Encodes and decodes as the model's own tokenizer does. Immutable; may be shared between threads.

    Control tokens have secret names inside (see `bundle`), drawn anew for each Tokenizer. Text is given to the library
    with the real names left as they are, and the secret ones put where a control token is meant.
    """

    def __init__(self, bundle: TokenizerBundle) -> None:
        """Build from `bundle`.

        Raises: ModelError, if the library refuses the bundle's document.
        """
        secret = f"\ufdd0{secrets.token_hex(16)}:"
        try:
            self._library = tokenizers.Tokenizer.from_buffer(
                bundle.tokenizer_json.replace(SEAL.encode(), secret.encode())
            )
        except ValueError as error:
            raise ModelError(f"the tokenizer cannot be loaded: {error}") from error
        self.bundle = bundle
        self._specials = {special.text: special.id for special in bundle.specials}
        self._controls = {special.id: special.text for special in bundle.specials}
        self._secret_names = {
            special.text: sealed_name(special.id).replace(SEAL, secret) for special in bundle.specials
        }
        controls = frozenset(self._specials.values())
        self._literal = {  # bytes of the tokens that do not follow the byte rule
            id_: b"" if id_ in controls else token.content.encode()
            for id_, token in self._library.get_added_tokens_decoder().items()
        }
        ordinary = (
            token.content for id_, token in self._library.get_added_tokens_decoder().items() if id_ not in controls
        )
        self._added = any_of([*self._specials, *ordinary])
        self._bytes_of = byte_level_alphabet() if bundle.byte_rule is ByteRule.BYTE_LEVEL else None
        self._vocab_size = 1 + max(self._library.get_vocab().values(), default=-1)

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id. A model may have more rows; those stand for no text."""
        return self._vocab_size

    def id_of(self, token: str) -> int | None:
        """The id of a token by its text in the vocabulary (a control token's by its real name), if there is one."""
        return self._specials[token] if token in self._specials else self._library.token_to_id(token)

    def encode(self, text: str, *, allow_special: bool) -> list[int]:
        """Token ids of `text`, nothing added; raises as `encode_segments` does."""
        return self.encode_segments([Segment(text, allow_special)])

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Token ids of the segments' joined text, where control tokens can only come from segments that allow them.

        Tokens may span segments: the result is that of the whole text, encoded at once.

        Raises:
            InvalidRequest: the text holds half a surrogate pair, which no encoding of Unicode can carry.
            TooLarge: the text is longer than MAX_TEXT_CHARACTERS.
        """
        text = "".join(self._with_secret_names(each.text) if each.allow_special else each.text for each in segments)
        if len(text) > MAX_TEXT_CHARACTERS:
            raise TooLarge(f"a prompt of {len(text)} characters; the limit is {MAX_TEXT_CHARACTERS}", field="prompt")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text is not valid Unicode: {error.reason}", field="prompt") from error
        ids: list[int] = self._library.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def encode_prompt(self, segments: Iterable[Segment]) -> list[int]:
        """As `encode_segments`, with BOS in front where the model's metadata asks for it, and never two of them."""
        ids, bos = self.encode_segments(segments), self.bundle.bos_token_id
        if not self.bundle.add_bos or bos is None or ids[:1] == [bos]:
            return ids
        return [bos, *ids]

    def token_bytes(self, id_: int) -> bytes:
        """The bytes one token stands for, possibly a part of a character; b"" for control tokens and unused ids.

        Joined over an answer they are exactly its UTF-8 text.
        """
        if (literal := self._literal.get(id_)) is not None:
            return literal
        piece = self._library.id_to_token(id_) if 0 <= id_ < self._vocab_size else None
        if piece is None:
            return b""
        return _sentencepiece_bytes(piece) if self._bytes_of is None else _byte_level_bytes(piece, self._bytes_of)

    def control_name(self, id_: int) -> str | None:
        """What templates call a control token; None for every other token."""
        return self._controls.get(id_)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` standing alone, control tokens left out; bytes that are not UTF-8 become U+FFFD."""
        raw = b"".join(map(self.token_bytes, ids))
        if self.bundle.strips_leading_space:
            raw = raw.removeprefix(b" ")
        return raw.decode(errors="replace")

    def _with_secret_names(self, text: str) -> str:
        names = self._secret_names
        return self._added.sub(lambda match: names.get(match[0], match[0]), text)


def byte_level_alphabet() -> Mapping[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: 256 entries.

    Source: GPT-2's `bytes_to_unicode`; printable Latin-1 stands for itself, the rest is moved to U+0100 and up.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = (byte for byte in range(256) if byte not in printable)
    table = {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(moved)}
    return MappingProxyType(table)


def _byte_level_bytes(piece: str, bytes_of: Mapping[str, int]) -> bytes:
    try:
        return bytes(map(bytes_of.__getitem__, piece))
    except KeyError:  # an entry that was never byte-level, such as a raw added word
        return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    return piece.replace("\u2581", " ").encode()
