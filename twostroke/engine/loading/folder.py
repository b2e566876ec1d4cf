"""The JSON files of a Hugging Face folder as a ModelConfig. What is not understood is refused, never ignored."""

from __future__ import annotations

from pathlib import Path

from twostroke.engine.backend import Activation
from twostroke.engine.config import MAX_LAYERS, ModelConfig
from twostroke.engine.loading.dialects import Bias, Dialect, dialect_of
from twostroke.engine.loading.fields import Fields
from twostroke.engine.loading.ropes import read_ropes
from twostroke.engine.loading.windows import layer_windows
from twostroke.errors import ModelError, UnsupportedModel

_ACTIVATIONS = {"silu": Activation.SILU, "swish": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}
_UNSUPPORTED_FLAGS = ("mlp_bias", "use_bidirectional_attention")
_UNSUPPORTED_KEYS = ("attn_logit_softcapping", "final_logit_softcapping")


def folder_config(folder: Path) -> ModelConfig:
    """Read config.json, generation_config.json and the tokenizer's end token in `folder`.

    Raises:
        ModelError: a file is damaged or lacks a field.
        UnsupportedModel: an architecture, rope type or setting this engine does not have.
    """
    config = Fields.read(folder / "config.json")
    architecture, dialect = dialect_of(config)
    _refuse_unsupported(config)
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    layers = config.integer("num_hidden_layers")
    if layers > MAX_LAYERS:
        raise ModelError(f"num_hidden_layers is {layers}; at most {MAX_LAYERS} are read")
    rope, local_rope = read_ropes(config, dialect)
    told_bias = dialect.bias is Bias.AS_TOLD and config.flag("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        name=folder.resolve().name,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.integer("head_dim", dialect.head_dim or hidden // max(heads, 1)),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        norm_offset=dialect.norm_offset,
        rope=rope,
        local_rope=local_rope,
        windows=layer_windows(config, dialect, layers),
        attention_scale=_attention_scale(config, dialect),
        max_positions=config.integer("max_position_embeddings"),
        tied_embeddings=config.flag("tie_word_embeddings", dialect.tied),
        attention_bias=told_bias or dialect.bias is Bias.HEADS,
        output_bias=told_bias,
        activation=_activation(config, dialect),
        end_token_ids=_end_tokens(folder, config),
        bos_token_id=config.integer("bos_token_id") if "bos_token_id" in config else None,
    )


def _refuse_unsupported(config: Fields) -> None:
    for key in _UNSUPPORTED_FLAGS:
        if config.flag(key, False):
            raise UnsupportedModel(f"{key} is not supported")
    for key in _UNSUPPORTED_KEYS:
        if key in config:
            raise UnsupportedModel(f"{key} is not supported")
    if "quantization_config" in config:
        raise UnsupportedModel("quantization_config: quantized safetensors are not supported; GGUF is")


def _activation(config: Fields, dialect: Dialect) -> Activation:
    told = config.text(dialect.activation_key, dialect.activation)
    if told not in _ACTIVATIONS:
        raise UnsupportedModel(f"{dialect.activation_key} {told} is not supported; {', '.join(_ACTIVATIONS)} are")
    return _ACTIVATIONS[told]


def _attention_scale(config: Fields, dialect: Dialect) -> float | None:
    if dialect.query_scalar is None:
        return None
    scalar = config.number("query_pre_attn_scalar", dialect.query_scalar)
    if not scalar > 0:
        raise ModelError(f"query_pre_attn_scalar is {scalar}; it must be positive")
    return float(scalar**-0.5)


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
