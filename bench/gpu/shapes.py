"""The heads of models that people serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.engine.attention import AttentionShape
from twostroke.kv.format import KvFormat


@dataclass(frozen=True, slots=True)
class Heads:
    """A model's heads."""

    model: str
    heads: int
    kv_heads: int
    head_dim: int


SHAPES: Sequence[Heads] = (
    Heads("SmolLM2-135M", 9, 3, 64),
    Heads("Llama-3-8B", 32, 8, 128),
    Heads("Qwen3-0.6B", 16, 8, 128),
    Heads("Qwen2.5-0.5B", 14, 2, 64),
    Heads("Gemma-3-270M", 4, 1, 256),
)
LARGE = SHAPES[1]


def attention_shape(heads: Heads, *, windows: tuple[int | None, ...]) -> AttentionShape:
    """Return the attention of a model with these heads and a layer for each window."""
    return AttentionShape(
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        scale=heads.head_dim**-0.5,
        windows=windows,
    )


def kv_format(heads: Heads, *, layers: int, dtype: str = "bfloat16", block_tokens: int = 16) -> KvFormat:
    """Return the format of pages for these heads."""
    return KvFormat(
        model=heads.model,
        weights_digest=b"",
        weight_mode="bf16",
        layers=layers,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        block_tokens=block_tokens,
        dtype=dtype,
        rope_digest=b"",
    )
