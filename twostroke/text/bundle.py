"""TokenizerBundle: everything needed to turn text into token ids and back, in one value that travels as bytes.

A worker builds it from its model's files and sends it to the router, which therefore needs no model file.

Control tokens are *sealed*: inside `tokenizer_json` each carries a name that no text holds, `SEAL` and its id. The
`Tokenizer` swaps `SEAL` for a secret of its own, so a control id can only come from where the tokenizer itself put the
sealed name, whatever the normalizer, pre-tokenizer or model would make of the real one.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from twostroke.errors import ModelError

MAX_BUNDLE_BYTES = 128 << 20
DIGEST_BYTES = 16
SEAL = "\ufdd0sealed:"  # starts with a Unicode noncharacter, never assigned, never in a vocabulary


class ByteRule(enum.Enum):
    """How the text of a vocabulary entry stands for bytes."""

    BYTE_LEVEL = "byte_level"  # one printable character a byte (GPT-2)
    SENTENCEPIECE = "sentencepiece"  # U+2581 for a space, <0xNN> for a byte that has no entry


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A control token: its id and the text that names it in templates."""

    id: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerBundle:
    """A tokenizer and its chat conventions; equal bundles have equal digests."""

    tokenizer_json: bytes  # the `tokenizers` format, control tokens sealed
    specials: tuple[SpecialToken, ...]  # in id order
    byte_rule: ByteRule
    strips_leading_space: bool = False  # decoding drops one space at the very start (SentencePiece's dummy prefix)
    chat_template: str | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    add_bos: bool = False
    end_token_ids: frozenset[int] = frozenset()  # every token that may end an answer

    def to_bytes(self) -> bytes:
        """Canonical JSON: the same bundle is always the same bytes."""
        fields = {
            "tokenizer_json": self.tokenizer_json.decode(),
            "specials": [[special.id, special.text] for special in self.specials],
            "byte_rule": self.byte_rule.value,
            "strips_leading_space": self.strips_leading_space,
            "chat_template": self.chat_template,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "add_bos": self.add_bos,
            "end_token_ids": sorted(self.end_token_ids),
        }
        return json.dumps(fields, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> TokenizerBundle:
        """Read what `to_bytes` wrote.

        Raises: ModelError, if `raw` is too large or is no bundle.
        """
        if len(raw) > MAX_BUNDLE_BYTES:
            raise ModelError(f"a tokenizer bundle of {len(raw)} bytes; at most {MAX_BUNDLE_BYTES} are read")
        try:
            fields = json.loads(raw)
            fields["tokenizer_json"] = fields["tokenizer_json"].encode()
            fields["specials"] = tuple(SpecialToken(int(id_), str(text)) for id_, text in fields["specials"])
            fields["byte_rule"] = ByteRule(fields["byte_rule"])
            fields["end_token_ids"] = frozenset(map(int, fields["end_token_ids"]))
            return cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelError(f"not a tokenizer bundle: {error}") from error

    @property
    def digest(self) -> bytes:
        """16 bytes of BLAKE2b over `to_bytes`."""
        return blake2b(self.to_bytes(), digest_size=DIGEST_BYTES, person=b"twostroke.tokens").digest()

    @property
    def bos_token(self) -> str | None:
        """The text of the beginning-of-sequence token, as templates name it."""
        return self._text_of(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        """The text of the end-of-sequence token, as templates name it."""
        return self._text_of(self.eos_token_id)

    def _text_of(self, id_: int | None) -> str | None:
        return next((special.text for special in self.specials if special.id == id_), None)


def sealed_name(id_: int) -> str:
    """The name of control token `id_` inside `TokenizerBundle.tokenizer_json`."""
    return f"{SEAL}{id_}\ufdd1"


def special_tokens(ids_and_texts: Iterable[tuple[int, str]]) -> tuple[SpecialToken, ...]:
    """Control tokens in id order."""
    return tuple(SpecialToken(id_, text) for id_, text in sorted(ids_and_texts))
