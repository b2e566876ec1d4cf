"""Tiny models with seeded weights, written as real files: a Hugging Face folder or a GGUF file with the same values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from tests.support.tiny_tokenizer import CONTROL_TOKENS, IM_END, VOCAB_SIZE
from twostroke.text.tokenizer import byte_level_alphabet

END_TOKEN = IM_END

Array = npt.NDArray[np.float32]
_F32 = gguf.GGMLQuantizationType.F32


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """What to write. Weights are scaled so that greedy text wanders and the best two logits lie well apart."""

    family: str = "llama"  # or mistral, qwen2
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    vocab: int = VOCAB_SIZE
    seed: int = 0
    tied: bool = True
    rope: Mapping[str, Any] = field(default_factory=dict)  # rope_scaling of config.json
    theta: float = 10_000.0
    max_positions: int = 2_048
    attention_bias: bool = False  # llama only; qwen2 always has query, key and value biases

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def inner(self) -> int:
        return 2 * self.hidden

    def config(self) -> dict[str, Any]:
        """config.json as Hugging Face writes it."""
        architecture = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
        own: dict[str, Any] = {"attention_bias": True} if self.attention_bias else {}
        own |= {"sliding_window": None} if self.family == "mistral" else {}
        return {
            "architectures": [architecture[self.family]],
            "model_type": self.family,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": self.theta,
            "rope_scaling": dict(self.rope) or None,
            "tie_word_embeddings": self.tied,
            "bos_token_id": None,
            "eos_token_id": END_TOKEN,
            "torch_dtype": "float32",
        } | own

    def tensors(self) -> dict[str, Array]:
        """Every tensor under its Hugging Face name, always the same for the same seed."""
        random = np.random.default_rng(self.seed)

        def normal(*shape: int, scale: float) -> Array:
            return (random.standard_normal(shape) * scale).astype(np.float32)

        def matrix(rows: int, columns: int, gain: float = 1.0) -> Array:
            return normal(rows, columns, scale=gain / math.sqrt(columns))

        made = {"model.embed_tokens.weight": normal(self.vocab, self.hidden, scale=0.25)}
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for layer in range(self.layers):
            name = f"model.layers.{layer}."
            made[name + "input_layernorm.weight"] = 1 + normal(self.hidden, scale=0.1)
            made[name + "self_attn.q_proj.weight"] = matrix(q, self.hidden, 1.5)
            made[name + "self_attn.k_proj.weight"] = matrix(kv, self.hidden, 1.5)
            made[name + "self_attn.v_proj.weight"] = matrix(kv, self.hidden)
            made[name + "self_attn.o_proj.weight"] = matrix(self.hidden, q, 2.0)
            made[name + "post_attention_layernorm.weight"] = 1 + normal(self.hidden, scale=0.1)
            made[name + "mlp.gate_proj.weight"] = matrix(self.inner, self.hidden, 2.0)
            made[name + "mlp.up_proj.weight"] = matrix(self.inner, self.hidden)
            made[name + "mlp.down_proj.weight"] = matrix(self.hidden, self.inner, 2.0)
            if self.family == "qwen2" or self.attention_bias:
                for part, rows in (("q", q), ("k", kv), ("v", kv)):
                    made[f"{name}self_attn.{part}_proj.bias"] = normal(rows, scale=0.3)
            if self.attention_bias:
                made[name + "self_attn.o_proj.bias"] = normal(self.hidden, scale=0.3)
        made["model.norm.weight"] = 1 + normal(self.hidden, scale=0.1)
        if not self.tied:
            made["lm_head.weight"] = normal(self.vocab, self.hidden, scale=0.25)
        return made


def write_tiny(folder: Path, **what: Any) -> Path:
    """Write a Hugging Face folder (config, generation config, safetensors) for `Tiny(**what)`; returns `folder`."""
    tiny = Tiny(**what)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny.config()))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END_TOKEN]}))
    save_file(tiny.tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_tiny_gguf(
    path: Path, *, quantization: gguf.GGMLQuantizationType = _F32, alignment: int | None = None, **what: Any
) -> Path:
    """Write the same model as one GGUF file, matrices in `quantization`; returns `path`."""
    tiny = Tiny(**what)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, tiny.family)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    _metadata(writer, tiny)
    for name, tensor in _gguf_tensors(tiny).items():
        kind = quantization if tensor.ndim == 2 else _F32
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(writer: gguf.GGUFWriter, tiny: Tiny) -> None:
    writer.add_name("tiny")
    writer.add_context_length(tiny.max_positions)
    writer.add_embedding_length(tiny.hidden)
    writer.add_block_count(tiny.layers)
    writer.add_feed_forward_length(tiny.inner)
    writer.add_head_count(tiny.heads)
    writer.add_head_count_kv(tiny.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(tiny.theta)
    writer.add_rope_dimension_count(tiny.head_dim)
    writer.add_vocab_size(tiny.vocab)
    if tiny.rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(tiny.rope["factor"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    alphabet = byte_level_alphabet()
    writer.add_token_list([*sorted(alphabet, key=alphabet.__getitem__), *CONTROL_TOKENS])
    writer.add_token_types([gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * len(CONTROL_TOKENS))
    writer.add_token_merges([])
    writer.add_eos_token_id(END_TOKEN)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)


def _gguf_tensors(tiny: Tiny) -> dict[str, Array]:
    """Rename as llama.cpp does, interleave query and key rows for llama, and write llama3 scaling as a tensor."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[tiny.family.upper()], tiny.layers)
    made: dict[str, Array] = {}
    for name, tensor in tiny.tensors().items():
        heads = {"q": tiny.heads, "k": tiny.kv_heads}.get(name.split(".")[-2][0]) if "self_attn" in name else None
        values = interleaved(tensor, heads) if heads and tiny.family == "llama" else tensor
        made[str(names.get_name(name, try_suffixes=(".weight", ".bias")))] = values
    if tiny.rope.get("rope_type") == "llama3":
        made["rope_freqs.weight"] = llama3_divisors(tiny)
    return made


def interleaved(rows: Array, heads: int) -> Array:
    """The order of query and key rows in a GGUF file of the llama architecture."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def llama3_divisors(tiny: Tiny) -> Array:
    """What llama.cpp's converter writes for rope type llama3, one wavelength at a time."""
    rope, divisors = tiny.rope, []
    low, high, context = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    for exponent in range(0, tiny.head_dim, 2):
        wavelength = 2 * math.pi * tiny.theta ** (exponent / tiny.head_dim)
        if wavelength < context / high:
            divisors.append(1.0)
        elif wavelength > context / low:
            divisors.append(float(rope["factor"]))
        else:
            smooth = (context / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, dtype=np.float32)
