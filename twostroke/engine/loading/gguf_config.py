"""The metadata of a GGUF file as a ModelConfig."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from twostroke.engine.config import ModelConfig, RopeConfig, RopeScaling
from twostroke.engine.loading.gguf_tensors import GgufSource
from twostroke.errors import ModelError, UnsupportedModel
from twostroke.gguf import GgufMetadata

_T = TypeVar("_T", int, float)

_ARCHITECTURES = ("llama", "qwen2")
_END_KEYS = ("eos", "eot", "eom")
_SCALINGS = {"none": RopeScaling.NONE, "linear": RopeScaling.LINEAR}


def gguf_config(path: Path, source: GgufSource) -> ModelConfig:
    """Read what `source`, the file at `path`, says of its model.

    Raises:
        ModelError: a key is missing or has another type.
        UnsupportedModel: an architecture, rope type or setting this engine does not have.
    """
    metadata, shapes = source.metadata, source.shapes
    keys = _Keys(metadata)
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden // max(heads, 1))
    positions = keys.integer("context_length")
    keys.refuse_unsupported(head_dim, positions)
    return ModelConfig(
        architecture=keys.architecture,
        name=metadata.text("general.name") or path.stem,
        vocab_size=shapes.get("model.embed_tokens.weight", (0,))[0],
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=keys.integer("block_count"),
        num_heads=heads,
        num_kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=keys.rope(source.rope_divisors()),
        max_positions=positions,
        tied_embeddings="lm_head.weight" not in shapes,
        attention_bias="model.layers.0.self_attn.q_proj.bias" in shapes,
        output_bias="model.layers.0.self_attn.o_proj.bias" in shapes,
        end_token_ids=_end_tokens(metadata),
        bos_token_id=metadata.integer("tokenizer.ggml.bos_token_id"),
    )


class _Keys:
    """The keys of one architecture, by the part after its name."""

    def __init__(self, metadata: GgufMetadata) -> None:
        self._metadata = metadata
        self.architecture = metadata.text("general.architecture") or "of unknown name"
        if self.architecture not in _ARCHITECTURES:
            supported = ", ".join(_ARCHITECTURES)
            raise UnsupportedModel(f"architecture {self.architecture} is not supported in GGUF; {supported} are")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._metadata.integer(f"{self.architecture}.{key}")
        return self._need(key, default if value is None else value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._metadata.number(f"{self.architecture}.{key}")
        return self._need(key, default if value is None else value)

    def _need(self, key: str, value: _T | None) -> _T:
        if value is None:
            raise ModelError(f"the GGUF file does not say {self.architecture}.{key}")
        return value

    def refuse_unsupported(self, head_dim: int, positions: int) -> None:
        """Raise UnsupportedModel for settings that would change the arithmetic."""
        for key, wanted in (
            ("attention.value_length", head_dim),
            ("rope.dimension_count", head_dim),
            ("expert_count", 0),
        ):
            if (value := self.integer(key, wanted)) != wanted:
                raise UnsupportedModel(f"{self.architecture}.{key} of {value} is not supported; {wanted} is")
        window = self.integer("attention.sliding_window", positions)
        if 0 < window < positions:
            raise UnsupportedModel(f"a sliding window of {window} tokens is not supported")

    def rope(self, divisors: tuple[float, ...] | None) -> RopeConfig:
        """Read rope settings; `divisors` come from the file's rope_freqs tensor."""
        legacy = self.number("rope.scale_linear", 1.0)
        kind = self._metadata.text(f"{self.architecture}.rope.scaling.type") or ("linear" if legacy != 1.0 else "none")
        if kind not in _SCALINGS:
            raise UnsupportedModel(f"rope type {kind} is not supported; {', '.join(_SCALINGS)} are")
        scaling = _SCALINGS[kind]
        return RopeConfig(
            theta=self.number("rope.freq_base", 10_000.0),
            scaling=scaling,
            factor=self.number("rope.scaling.factor", legacy) if scaling is RopeScaling.LINEAR else 1.0,
            divisors=divisors,
        )


def _end_tokens(metadata: GgufMetadata) -> frozenset[int]:
    """Unite end of text, end of turn and end of message."""
    ids = (metadata.integer(f"tokenizer.ggml.{key}_token_id") for key in _END_KEYS)
    return frozenset(token for token in ids if token is not None)
