"""KvFormat: everything two parties must agree on before they may share a block."""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass
from hashlib import blake2b

from twostroke.errors import FormatMismatch
from twostroke.kv.keys import HASH_SCHEME, KEY_BYTES

LAYOUT = "block-major-nhd/v1"  # [layers, 2, block_tokens, kv_heads, head_dim], little-endian, rotated keys
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFormat:
    """Identity of block bytes. Two formats are equal when their digests are."""

    model: str
    weights_digest: bytes
    weight_mode: str  # the values behind the matrices, such as f16
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    rope_digest: bytes
    adapter: str = ""
    layout: str = LAYOUT
    hash_scheme: str = HASH_SCHEME

    @property
    def digest(self) -> bytes:
        """16 bytes of BLAKE2b over the canonical encoding: fields in name order, tagged and length-delimited."""
        digest = blake2b(digest_size=KEY_BYTES, person=b"twostroke.kvfmt")
        for field in sorted(dataclasses.fields(self), key=lambda each: each.name):
            value = getattr(self, field.name)
            kind, raw = (b"b", value) if isinstance(value, bytes) else (b"v", str(value).encode())
            name = field.name.encode()
            digest.update(struct.pack("<I", len(name)) + name + kind + struct.pack("<I", len(raw)) + raw)
        return digest.digest()

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[layers, 2 (key, value), block_tokens, kv_heads, head_dim]."""
        return (self.layers, 2, self.block_tokens, self.kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block; a partial tail block takes as many."""
        elements = self.layers * 2 * self.block_tokens * self.kv_heads * self.head_dim
        return elements * ELEMENT_BYTES[self.dtype]

    def require_equal(self, other: KvFormat, *, who: str) -> None:
        """Raise FormatMismatch naming the first field in which `who`'s format differs from this one."""
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                shown = [value.hex() if isinstance(value, bytes) else value for value in (mine, theirs)]
                raise FormatMismatch(
                    f"{field.name} differs: {shown[0]} here, {shown[1]} at {who}", field=f"kv_format.{field.name}"
                )
