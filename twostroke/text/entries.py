"""The entries of a GGUF file's vocabulary and what each of them is."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from twostroke.errors import ModelError
from twostroke.gguf import GgufMetadata
from twostroke.text.sealing import Document


class Kind(enum.IntEnum):
    """What an entry is, by the number in `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2  # stands for what no other entry does
    CONTROL = 3  # not text
    USER_DEFINED = 4  # text that is always a unit
    UNUSED = 5
    BYTE = 6  # <0xNN>


@dataclass(frozen=True, slots=True)
class Entries:
    """All entries, in id order."""

    pieces: tuple[str, ...]
    kinds: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.kinds) != len(self.pieces) or len(set(self.pieces)) != len(self.pieces):
            raise ModelError("the GGUF vocabulary has entries twice, or not a type for each")

    @classmethod
    def read(cls, metadata: GgufMetadata) -> Entries:
        """Read `metadata`; raises ModelError when there are none or they contradict each other."""
        pieces = metadata.strings("tokenizer.ggml.tokens")
        if pieces is None:
            raise ModelError("the GGUF file has no tokenizer.ggml.tokens")
        return cls(pieces, metadata.integers("tokenizer.ggml.token_type") or (Kind.NORMAL,) * len(pieces))

    def ids_of(self, kind: Kind) -> frozenset[int]:
        """The ids of all entries of `kind`."""
        return frozenset(id_ for id_, each in enumerate(self.kinds) if each == kind)

    def added_tokens(self) -> list[Document]:
        """Entries that are matched as units, as a `tokenizers` document has them."""
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return [
            {"id": id_, "content": piece, **flags, "special": kind != Kind.USER_DEFINED}
            for id_, (piece, kind) in enumerate(zip(self.pieces, self.kinds, strict=True))
            if kind in (Kind.UNKNOWN, Kind.CONTROL, Kind.USER_DEFINED)
        ]
