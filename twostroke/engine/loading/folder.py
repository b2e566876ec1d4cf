"""The JSON files of a Hugging Face folder as a ModelConfig. What is not understood is refused, never ignored."""

from __future__ import annotations

from pathlib import Path

from twostroke.engine.config import ModelConfig, RopeConfig, RopeScaling
from twostroke.engine.loading.fields import Fields
from twostroke.errors import UnsupportedModel

_QKV_BIAS = {"llama": False, "mistral": False, "qwen2": True}  # also the registry of what is supported
_ACTIVATIONS = ("silu", "swish")
_ROPE_TYPES = {"default": RopeScaling.NONE, "linear": RopeScaling.LINEAR, "llama3": RopeScaling.LLAMA3}


def folder_config(folder: Path) -> ModelConfig:
    """Read config.json, generation_config.json and the tokenizer's end token in `folder`.

    Raises:
        ModelError: a file is damaged or lacks a field.
        UnsupportedModel: an architecture, rope type or setting this engine does not have.
    """
    config = Fields.read(folder / "config.json")
    architecture = config.text("model_type")
    if architecture not in _QKV_BIAS:
        raise UnsupportedModel(f"architecture {architecture} is not supported; {', '.join(_QKV_BIAS)} are")
    _refuse_unsupported(config, architecture)
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    biased = architecture == "llama" and config.flag("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        name=folder.resolve().name,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.integer("head_dim", hidden // max(heads, 1)),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=_rope(config),
        max_positions=config.integer("max_position_embeddings"),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        attention_bias=biased or _QKV_BIAS[architecture],
        output_bias=biased,
        end_token_ids=_end_tokens(folder, config),
        bos_token_id=config.integer("bos_token_id") if "bos_token_id" in config else None,
    )


def _refuse_unsupported(config: Fields, architecture: str) -> None:
    activation = config.text("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(f"hidden_act {activation} is not supported; silu is")
    if config.flag("mlp_bias", False):
        raise UnsupportedModel("mlp_bias is not supported")
    if "quantization_config" in config:
        raise UnsupportedModel("quantization_config: quantized safetensors are not supported; GGUF is")
    window = _sliding_window(config, architecture)
    if window is not None and window < config.integer("max_position_embeddings"):
        raise UnsupportedModel(f"sliding_window of {window} tokens is not supported")
    kinds = config.get("layer_types") or []
    if isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds):
        raise UnsupportedModel("layer_types other than full_attention are not supported")


def _sliding_window(config: Fields, architecture: str) -> int | None:
    """Return how many tokens attention looks back, None for all; transformers' defaults differ by architecture."""
    if architecture == "qwen2" and not config.flag("use_sliding_window", False):
        return None
    if architecture == "mistral" and "sliding_window" not in config.items():
        return 4_096
    return config.integer("sliding_window") if "sliding_window" in config else None


def _rope(config: Fields) -> RopeConfig:
    """Read rope settings: `rope_parameters` of transformers 5, or `rope_scaling` with the legacy key `type`."""
    key = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    scaling = config.inner(key)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in _ROPE_TYPES:
        raise UnsupportedModel(f"rope type {kind} is not supported; {', '.join(_ROPE_TYPES)} are")
    if any(isinstance(value, dict) for value in scaling.items().values()):
        raise UnsupportedModel(f"{key} that differ between layers are not supported")
    if any(where.number("partial_rotary_factor", 1.0) != 1.0 for where in (config, scaling)):
        raise UnsupportedModel("partial_rotary_factor is not supported")
    theta = scaling.number("rope_theta", config.number("rope_theta", 10_000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, scaling=RopeScaling.LINEAR, factor=scaling.number("factor"))
    positions = config.integer("max_position_embeddings")
    return RopeConfig(
        theta=theta,
        scaling=RopeScaling.LLAMA3,
        factor=scaling.number("factor"),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_max_positions=scaling.integer("original_max_position_embeddings", positions),
    )


def _end_tokens(folder: Path, config: Fields) -> frozenset[int]:
    """Unite all end tokens: any one source alone lets some answers run on."""
    generation = Fields.read_if_present(folder / "generation_config.json")
    return config.token_ids("eos_token_id") | generation.token_ids("eos_token_id") | _tokenizer_end(folder)


def _tokenizer_end(folder: Path) -> frozenset[int]:
    """Return the id of the tokenizer's own end token, as far as the folder's files tell it."""
    settings = Fields.read_if_present(folder / "tokenizer_config.json")
    named = settings.get("eos_token")
    content = named.get("content") if isinstance(named, dict) else named
    if content is None:
        return frozenset()
    for number, token in settings.inner("added_tokens_decoder").items().items():
        if isinstance(token, dict) and token.get("content") == content and number.isdecimal():
            return frozenset({int(number)})
    tokenizer = Fields.read_if_present(folder / "tokenizer.json")
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and token.get("content") == content:
            return Fields("tokenizer.json: added_tokens", token).token_ids("id")
    return tokenizer.inner("model").inner("vocab").token_ids(str(content))
