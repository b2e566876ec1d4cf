"""What a model is, as numbers: the same whether it came from a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import dataclasses
import enum
import math
import struct
from dataclasses import dataclass
from hashlib import blake2b

from twostroke.engine.attention import AttentionShape
from twostroke.engine.backend import Activation
from twostroke.errors import ModelError

DIGEST_BYTES = 16
MAX_LAYERS = 1_000  # more are refused before anything is made for each of them
_LEAST, _MOST = 1e-9, 1e12  # of factors: whatever is made of a few of them and a position is a finite float32


class RopeScaling(enum.StrEnum):
    """How rotary frequencies are stretched for contexts longer than the model was trained on."""

    NONE = "none"
    LINEAR = "linear"  # positions divided by `factor` (position interpolation, arXiv:2306.15595)
    LLAMA3 = "llama3"  # long wavelengths divided by `factor`, short ones kept, smooth between


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding in the half-rotation layout (arXiv:2104.09864)."""

    theta: float = 10_000.0
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3 only, as are the next two
    high_freq_factor: float = 4.0
    original_max_positions: int = 8_192
    divisors: tuple[float, ...] | None = None  # one per frequency; a GGUF file's rope_freqs tensor

    def __post_init__(self) -> None:
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_positions"):
            if not _LEAST <= getattr(self, name) <= _MOST:
                raise ModelError(f"rope {name} is {getattr(self, name):g}; it must lie between {_LEAST} and {_MOST:g}")
        if self.scaling is RopeScaling.LLAMA3 and self.high_freq_factor <= self.low_freq_factor:
            raise ModelError("rope high_freq_factor must be above low_freq_factor")
        if self.divisors is not None and not all(_LEAST <= divisor < math.inf for divisor in self.divisors):
            raise ModelError(f"rope divisors must be finite, from {_LEAST}")

    @property
    def digest(self) -> bytes:
        """16 bytes of BLAKE2b over the canonical encoding; keys rotated differently never share a block."""
        return _digest(self, b"twostroke.rope")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and arithmetic of a decoder. What all models of an architecture share is in its file in `models`, not here.

    Attributes:
        windows: for each layer, how many of the latest tokens a query sees, its own included; None sees all
            (sliding windows, arXiv:2004.05150).
        local_rope: how layers with a window rotate; None where all layers rotate alike.
        attention_scale: what scores are multiplied by; None for head_dim ** -0.5 (arXiv:1706.03762).
        norm_offset: what is added to the norms' weights as the files hold them: 1 where they hold the distance from 1.
    """

    architecture: str  # a name in `models.registry`
    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    local_rope: RopeConfig | None = None
    windows: tuple[int | None, ...]
    attention_scale: float | None = None
    norm_offset: float = 0.0
    max_positions: int
    tied_embeddings: bool  # the output head is the embedding matrix
    attention_bias: bool = False  # on the query, key and value projections
    output_bias: bool = False  # on the attention's output projection
    activation: Activation = Activation.SILU
    end_token_ids: frozenset[int]
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and value < 1:
                raise ModelError(f"{field.name} is {value}; it must be at least 1")
        if not 0 <= self.norm_eps < 1:
            raise ModelError(f"norm_eps is {self.norm_eps}; it must lie between 0 and 1")
        if len(self.windows) != self.num_layers or not all(window is None or window >= 1 for window in self.windows):
            raise ModelError(f"windows {self.windows} are not a positive number of tokens for each layer")
        if self.attention_scale is not None and not _LEAST <= self.attention_scale <= _MOST:
            raise ModelError(f"attention_scale is {self.attention_scale}; it must lie between {_LEAST} and {_MOST:g}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}; rotation needs an even number")
        for rope in (self.rope, self.rope_of_windows):
            if rope.divisors is not None and len(rope.divisors) != self.head_dim // 2:
                raise ModelError(f"{len(rope.divisors)} rope divisors for {self.head_dim // 2} frequencies")
        beyond = sorted(token for token in self._special_ids() if not 0 <= token < self.vocab_size)
        if beyond:
            raise ModelError(f"token ids {beyond} lie outside the vocabulary of {self.vocab_size}")

    def _special_ids(self) -> frozenset[int]:
        return self.end_token_ids | ({self.bos_token_id} if self.bos_token_id is not None else set())

    @property
    def attention(self) -> AttentionShape:
        """Shape of the attention."""
        return AttentionShape(
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale,
            windows=self.windows,
        )

    @property
    def rope_of_windows(self) -> RopeConfig:
        """How layers with a window rotate."""
        return self.rope if self.local_rope is None else self.local_rope

    @property
    def rope_digest(self) -> bytes:
        """16 bytes over all that rotates keys: one rope's own digest, or both of a model that has two."""
        if self.local_rope is None:
            return self.rope.digest
        both = self.rope.digest + self.local_rope.digest
        return blake2b(both, digest_size=DIGEST_BYTES, person=b"twostroke.ropes").digest()

    @property
    def arithmetic_digest(self) -> bytes:
        """16 bytes over every field that changes what is computed: all but names and special tokens."""
        plain = dataclasses.replace(self, name="", end_token_ids=frozenset(), bos_token_id=None)
        return _digest(plain, b"twostroke.model")


def _digest(value: RopeConfig | ModelConfig, person: bytes) -> bytes:
    """Hash fields in name order, tagged and length-delimited; floats by their shortest exact decimal."""
    digest = blake2b(digest_size=DIGEST_BYTES, person=person)
    for field in sorted(dataclasses.fields(value), key=lambda each: each.name):
        part = getattr(value, field.name)
        raw = part.digest if isinstance(part, RopeConfig) else repr(part).encode()
        for piece in (field.name.encode(), raw):
            digest.update(struct.pack("<I", len(piece)) + piece)
    return digest.digest()
