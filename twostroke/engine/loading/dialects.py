"""What a config.json leaves unsaid: how each architecture's own configuration class in transformers completes it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from twostroke.engine.loading.fields import Fields
from twostroke.errors import UnsupportedModel


class Bias(enum.Enum):
    """Which projections of the attention have biases."""

    NEVER = enum.auto()
    HEADS = enum.auto()  # queries, keys and values
    AS_TOLD = enum.auto()  # these and the output, if attention_bias says so


class Windows(enum.Enum):
    """Which layers see only the latest tokens, where layer_types is absent."""

    NEVER = enum.auto()
    EVERY = enum.auto()  # all layers, if sliding_window is a number
    LATER = enum.auto()  # from max_window_layers on, if use_sliding_window says so
    BETWEEN = enum.auto()  # all but each sliding_window_pattern-th


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One architecture's."""

    bias: Bias
    windows: Windows = Windows.NEVER
    activation_key: str = "hidden_act"
    activation: str = "silu"
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    tied: bool = False
    theta: float = 10_000.0
    local_theta: float | None = None  # of layers with a window; None where all layers rotate alike
    query_scalar: float | None = None  # query_pre_attn_scalar; None where scores are scaled by the heads' size
    norm_offset: float = 0.0


_DIALECTS: Mapping[str, Dialect] = {
    "llama": Dialect(bias=Bias.AS_TOLD),
    "mistral": Dialect(bias=Bias.NEVER, windows=Windows.EVERY),
    "qwen2": Dialect(bias=Bias.HEADS, windows=Windows.LATER),
    "qwen3": Dialect(bias=Bias.AS_TOLD, windows=Windows.LATER, head_dim=128),
    "gemma3_text": Dialect(
        bias=Bias.AS_TOLD,
        windows=Windows.BETWEEN,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        head_dim=256,
        tied=True,
        theta=1_000_000.0,
        local_theta=10_000.0,
        query_scalar=256.0,
        norm_offset=1.0,
    ),
}


def dialect_of(config: Fields) -> tuple[str, Dialect]:
    """Return the architecture and its dialect; raises UnsupportedModel for another."""
    architecture = config.text("model_type")
    if architecture == "gemma3":
        raise UnsupportedModel("architecture gemma3 with images is not supported; its text models, gemma3_text, are")
    if architecture not in _DIALECTS:
        raise UnsupportedModel(f"architecture {architecture} is not supported; {', '.join(_DIALECTS)} are")
    return architecture, _DIALECTS[architecture]
