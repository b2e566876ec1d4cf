"""Tiny models with seeded weights, written as Hugging Face folders; `tiny_gguf` writes the same as GGUF files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from tests.support.tiny_tokenizer import IM_END, VOCAB_SIZE

END_TOKEN = IM_END

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """What to write. Weights are scaled so that greedy text wanders and the best two logits lie well apart."""

    family: str = "llama"  # or mistral, qwen2, qwen3, gemma3
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
    window: int | None = None  # gemma3: of all layers but each sixth; mistral: of all
    query_scalar: int | None = None  # gemma3, folders only: what the scores' scale comes from, if not head_dim

    @property
    def head_dim(self) -> int:
        return (2 if self.family in ("qwen3", "gemma3") else 1) * self.hidden // self.heads

    @property
    def norm_offset(self) -> float:
        """What a norm's weights are stored relative to, in a folder."""
        return 1.0 if self.family == "gemma3" else 0.0

    @property
    def inner(self) -> int:
        return 2 * self.hidden

    def config(self) -> dict[str, Any]:
        """config.json as Hugging Face writes it."""
        return {
            "architectures": [_CLASSES[self.family]],
            "model_type": "gemma3_text" if self.family == "gemma3" else self.family,
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
        } | self._own()

    def _own(self) -> dict[str, Any]:
        """What only this family's config.json holds."""
        if self.family == "gemma3":
            return {
                "hidden_activation": "gelu_pytorch_tanh",
                "head_dim": self.head_dim,
                "query_pre_attn_scalar": self.query_scalar or self.head_dim,
                "sliding_window": self.window,
            }
        own: dict[str, Any] = {"hidden_act": "silu"}
        own |= {"attention_bias": True} if self.attention_bias else {}
        own |= {"sliding_window": self.window} if self.family == "mistral" else {}
        return own | ({"head_dim": self.head_dim} if self.family == "qwen3" else {})

    def tensors(self) -> dict[str, Array]:
        """Every tensor under its Hugging Face name, always the same for the same seed."""
        random = np.random.default_rng(self.seed)

        def normal(*shape: int, scale: float) -> Array:
            return (random.standard_normal(shape) * scale).astype(np.float32)

        def matrix(rows: int, columns: int, gain: float = 1.0) -> Array:
            return normal(rows, columns, scale=gain / math.sqrt(columns))

        def norm(size: int) -> Array:
            return 1 - np.float32(self.norm_offset) + normal(size, scale=0.1)

        made = {"model.embed_tokens.weight": normal(self.vocab, self.hidden, scale=0.25)}
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for layer in range(self.layers):
            name = f"model.layers.{layer}."
            made[name + "input_layernorm.weight"] = norm(self.hidden)
            made[name + "self_attn.q_proj.weight"] = matrix(q, self.hidden, 1.5)
            made[name + "self_attn.k_proj.weight"] = matrix(kv, self.hidden, 1.5)
            made[name + "self_attn.v_proj.weight"] = matrix(kv, self.hidden)
            made[name + "self_attn.o_proj.weight"] = matrix(self.hidden, q, 2.0)
            made[name + "post_attention_layernorm.weight"] = norm(self.hidden)
            made[name + "mlp.gate_proj.weight"] = matrix(self.inner, self.hidden, 2.0)
            made[name + "mlp.up_proj.weight"] = matrix(self.inner, self.hidden)
            made[name + "mlp.down_proj.weight"] = matrix(self.hidden, self.inner, 2.0)
            if self.family == "qwen2" or self.attention_bias:
                for part, rows in (("q", q), ("k", kv), ("v", kv)):
                    made[f"{name}self_attn.{part}_proj.bias"] = normal(rows, scale=0.3)
            if self.attention_bias:
                made[name + "self_attn.o_proj.bias"] = normal(self.hidden, scale=0.3)
            if self.family in ("qwen3", "gemma3"):
                for part in ("q", "k"):
                    made[f"{name}self_attn.{part}_norm.weight"] = norm(self.head_dim)
            if self.family == "gemma3":
                for part in ("pre", "post"):
                    made[f"{name}{part}_feedforward_layernorm.weight"] = norm(self.hidden)
        made["model.norm.weight"] = norm(self.hidden)
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


def edit(folder: Path, name: str = "config.json", **changes: Any) -> Path:
    """Change fields of a JSON file of the folder, which may be absent; returns `folder`."""
    path = folder / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))
    return folder
