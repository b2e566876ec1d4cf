"""The metadata of a GGUF file as a ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from twostroke.engine.backend import Activation
from twostroke.engine.config import MAX_LAYERS, ModelConfig, RopeConfig, RopeScaling
from twostroke.engine.loading.gguf_tensors import GgufSource
from twostroke.errors import ModelError, UnsupportedModel
from twostroke.gguf import GgufMetadata, end_tokens

_T = TypeVar("_T", int, float)

_SCALINGS = {"none": RopeScaling.NONE, "linear": RopeScaling.LINEAR}
_GEMMA3_27B_LAYERS = 62  # the one Gemma 3 whose scores are not scaled by the heads' size


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dialect:
    """What files of an architecture mean; norms are stored as they multiply, whatever the folder's form."""

    architecture: str  # its name in `models.registry`
    activation: Activation = Activation.SILU
    window_pattern: int | None = None  # all layers but each so many-th have a window; None: none has
    local_theta: float | None = None  # of layers with a window


_DIALECTS: Mapping[str, _Dialect] = {
    "llama": _Dialect(architecture="llama"),
    "qwen2": _Dialect(architecture="qwen2"),
    "qwen3": _Dialect(architecture="qwen3"),
    "gemma3": _Dialect(
        architecture="gemma3_text", activation=Activation.GELU_TANH, window_pattern=6, local_theta=10_000.0
    ),
}


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
    keys.refuse_unsupported(head_dim)
    return ModelConfig(
        architecture=keys.dialect.architecture,
        name=metadata.text("general.name") or path.stem,
        vocab_size=shapes.get("model.embed_tokens.weight", (0,))[0],
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=keys.layers(),
        num_heads=heads,
        num_kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=keys.rope(source.rope_divisors()),
        local_rope=keys.local_rope(),
        windows=keys.windows(),
        attention_scale=keys.attention_scale(hidden / max(heads, 1)),
        max_positions=keys.integer("context_length"),
        tied_embeddings="lm_head.weight" not in shapes,
        attention_bias="model.layers.0.self_attn.q_proj.bias" in shapes,
        output_bias="model.layers.0.self_attn.o_proj.bias" in shapes,
        activation=keys.dialect.activation,
        end_token_ids=end_tokens(metadata),
        bos_token_id=metadata.integer("tokenizer.ggml.bos_token_id"),
    )


class _Keys:
    """The keys of one architecture, by the part after its name."""

    def __init__(self, metadata: GgufMetadata) -> None:
        self._metadata = metadata
        self._prefix = metadata.text("general.architecture") or "of unknown name"
        if self._prefix not in _DIALECTS:
            supported = ", ".join(_DIALECTS)
            raise UnsupportedModel(f"architecture {self._prefix} is not supported in GGUF; {supported} are")
        self.dialect = _DIALECTS[self._prefix]

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._metadata.integer(f"{self._prefix}.{key}")
        return self._need(key, default if value is None else value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._metadata.number(f"{self._prefix}.{key}")
        return self._need(key, default if value is None else value)

    def _need(self, key: str, value: _T | None) -> _T:
        if value is None:
            raise ModelError(f"the GGUF file does not say {self._prefix}.{key}")
        return value

    def refuse_unsupported(self, head_dim: int) -> None:
        """Raise UnsupportedModel for settings that would change the arithmetic."""
        for key, wanted in (
            ("attention.value_length", head_dim),
            ("rope.dimension_count", head_dim),
            ("expert_count", 0),
            ("attn_logit_softcapping", 0),
            ("final_logit_softcapping", 0),
        ):
            if (value := self.number(key, wanted)) != wanted:
                raise UnsupportedModel(f"{self._prefix}.{key} of {value:g} is not supported; {wanted} is")
        if self._metadata.flag(f"{self._prefix}.attention.causal") is False:
            raise UnsupportedModel(f"{self._prefix}.attention.causal of false is not supported")

    def layers(self) -> int:
        layers = self.integer("block_count")
        if layers > MAX_LAYERS:
            raise ModelError(f"{self._prefix}.block_count is {layers}; at most {MAX_LAYERS} are read")
        return layers

    def windows(self) -> tuple[int | None, ...]:
        """Return the window of each layer; files tell its size, and their readers know its pattern."""
        layers, positions = self.layers(), self.integer("context_length")
        window = self.integer("attention.sliding_window", 0)
        if self.dialect.window_pattern is not None and window > 0:
            pattern = self.integer("attention.sliding_window_pattern", self.dialect.window_pattern)
            if pattern < 1:
                raise ModelError(f"{self._prefix}.attention.sliding_window_pattern is {pattern}")
            return tuple(window if (layer + 1) % pattern else None for layer in range(layers))
        if 0 < window < positions:
            raise UnsupportedModel(f"a sliding window of {window} tokens is not supported in {self._prefix}")
        return (None,) * layers

    def attention_scale(self, hidden_per_head: float) -> float | None:
        """Return what scores are multiplied by, None for the usual; files of Gemma leave it to their readers."""
        told = self._metadata.number(f"{self._prefix}.attention.scale")
        if told is not None:
            return told
        special = self._prefix == "gemma3" and self.layers() == _GEMMA3_27B_LAYERS
        return float(hidden_per_head**-0.5) if special else None

    def rope(self, divisors: tuple[float, ...] | None) -> RopeConfig:
        """Read rope settings; `divisors` come from the file's rope_freqs tensor."""
        legacy = self.number("rope.scale_linear", 1.0)
        kind = self._metadata.text(f"{self._prefix}.rope.scaling.type") or ("linear" if legacy != 1.0 else "none")
        if kind not in _SCALINGS:
            raise UnsupportedModel(f"rope type {kind} is not supported; {', '.join(_SCALINGS)} are")
        scaling = _SCALINGS[kind]
        return RopeConfig(
            theta=self.number("rope.freq_base", 10_000.0),
            scaling=scaling,
            factor=self.number("rope.scaling.factor", legacy) if scaling is RopeScaling.LINEAR else 1.0,
            divisors=divisors,
        )

    def local_rope(self) -> RopeConfig | None:
        """Read how layers with a window rotate: never scaled."""
        theta = self.dialect.local_theta
        return None if theta is None else RopeConfig(theta=self.number("rope.freq_base_swa", theta))
