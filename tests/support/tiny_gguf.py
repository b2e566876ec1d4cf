"""Tiny models as GGUF files, in the names and orders of llama.cpp's converter."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.tiny import END_TOKEN, Array, Tiny
from tests.support.tiny_tokenizer import CONTROL_TOKENS
from twostroke.text.tokenizer import byte_level_alphabet

_F32 = gguf.GGMLQuantizationType.F32


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
    writer.add_key_length(tiny.head_dim)
    writer.add_value_length(tiny.head_dim)
    if tiny.window is not None:
        writer.add_sliding_window(tiny.window)
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
    """Rename as llama.cpp does, interleave query and key rows for llama, and store norms as they multiply.

    Scaling of kind llama3 becomes a tensor.
    """
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[tiny.family.upper()], tiny.layers)
    made: dict[str, Array] = {}
    for name, tensor in tiny.tensors().items():
        heads = {"q": tiny.heads, "k": tiny.kv_heads}.get(name.split(".")[-2][0]) if "self_attn" in name else None
        values = interleaved(tensor, heads) if heads and tiny.family == "llama" else tensor
        values = values + np.float32(tiny.norm_offset) if "norm" in name else values
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


def write_gguf(path: Path, **values: Any) -> Path:
    """Write a tiny llama's file, then the same metadata again with `values` set or replaced."""
    write_tiny_gguf(path)
    reader = gguf.GGUFReader(path)
    out = path.with_name("edited.gguf")
    writer = gguf.GGUFWriter(out, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture" or field.name in values:
            continue
        kinds = field.types
        if len(kinds) == 1 or field.data:  # an empty array cannot be written
            writer.add_key_value(field.name, field.contents(), kinds[0], kinds[1] if len(kinds) > 1 else None)
    for name, value in values.items():
        kind = gguf.GGUFValueType.STRING if isinstance(value, str) else gguf.GGUFValueType.UINT32
        writer.add_key_value(name, value, gguf.GGUFValueType.FLOAT32 if isinstance(value, float) else kind)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out
