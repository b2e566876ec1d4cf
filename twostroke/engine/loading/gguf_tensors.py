"""The tensors of a GGUF file, dequantized and renamed to Hugging Face's names, as a TensorSource."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import dequantize
from torch import Tensor

from twostroke.errors import ModelError, UnsupportedModel
from twostroke.gguf import GgufMetadata, TensorInfo, read_header

_SUPPORTED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_KINDS = {each.value: each for each in gguf.GGMLQuantizationType}
_SLAB_VALUES = 1 << 18  # dequantized at once: a whole number of blocks whose temporaries stay in the cache
_ROPE_DIVISORS = "rope_freqs.weight"
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_BLOCK_OF = {
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}


class GgufSource:
    """One GGUF file.

    Raises:
        ModelError: the file is damaged or ends before its tensors do.
        UnsupportedModel: a tensor's type has no dequantizer here, or the file is one part of several.
    """

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self.metadata: GgufMetadata = header.metadata
        self._path = path
        _refuse_split(path, header.metadata)
        self._bytes: npt.NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
        self._tensors: dict[str, TensorInfo] = {}
        in_block = _IN_BLOCK | _IN_BLOCK_OF.get(header.metadata.text("general.architecture") or "", {})
        for info in header.tensors:
            self._check(info)
            name = _rename(info.name, in_block)
            if self._tensors.setdefault(name, info) is not info:
                raise ModelError(f"{path.name} holds {name} under two names")
        self._divisors = self._tensors.pop(_ROPE_DIVISORS, None)
        self._shapes = {name: info.shape for name, info in self._tensors.items()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor by its Hugging Face name; one without such a name keeps its own."""
        return self._shapes

    @property
    def files(self) -> tuple[Path, ...]:
        """The one file."""
        return (self._path,)

    def rope_divisors(self) -> tuple[float, ...] | None:
        """Return what each rotary frequency is divided by, if the file tells."""
        if self._divisors is None:
            return None
        return tuple(self._dequantize(self._divisors).view(-1).tolist())

    def read(self, name: str) -> Tensor:
        """Return one tensor as float32, query and key rows in the half-rotation order."""
        tensor = self._dequantize(self._tensors[name])
        heads = self._permuted_heads(name)
        return tensor if heads is None else half_rotation_order(tensor, heads)

    def _permuted_heads(self, name: str) -> int | None:
        """Return how many heads the rows of `name` were interleaved in; None when they were not."""
        if self.metadata.text("general.architecture") != "llama":
            return None
        heads = self.metadata.integer("llama.attention.head_count")
        if ".k_proj." in name:
            return self.metadata.integer("llama.attention.head_count_kv") or heads
        return heads if ".q_proj." in name else None

    def _check(self, info: TensorInfo) -> None:
        kind = _kind(info)
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        if info.shape[-1] % block:
            raise ModelError(f"tensor {info.name} of type {kind.name} has rows of {info.shape[-1]}, not whole blocks")
        if info.offset + _size(info) > self._bytes.size:
            raise ModelError(f"{self._path.name} ends before tensor {info.name} does; the file is cut short")

    def _dequantize(self, info: TensorInfo) -> Tensor:
        """Dequantize slab by slab; blocks follow each other without gaps, so a slab is passed as one long row."""
        kind = _kind(info)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        raw = self._bytes[info.offset : info.offset + _size(info)]
        out = torch.empty(info.shape, dtype=torch.float32)
        target: npt.NDArray[np.float32] = out.view(-1).numpy()
        slab_bytes = _SLAB_VALUES // block * block_bytes
        for index, start in enumerate(range(0, raw.size, slab_bytes)):
            with np.errstate(all="ignore"):  # a scale that is not finite is refused by tensor name, later
                values = dequantize(raw[None, start : start + slab_bytes], kind)[0]
            target[index * _SLAB_VALUES :][: values.size] = values
        return out


def half_rotation_order(rows: Tensor, heads: int) -> Tensor:
    """Undo the interleaving of query or key rows (or biases) that GGUF's llama architecture stores.

    There, rows 2i and 2i + 1 of a head rotate together; here, rows i and i + head_dim / 2 do.
    Source: `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py, inverted.
    """
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _rename(name: str, in_block: Mapping[str, str]) -> str:
    block = _BLOCK.fullmatch(name)
    if block is not None and block[2] in in_block:
        return f"model.layers.{block[1]}.{in_block[block[2]]}.{block[3]}"
    return _GLOBAL.get(name, name)


def _kind(info: TensorInfo) -> gguf.GGMLQuantizationType:
    kind = _KINDS.get(info.type)
    if kind is None or kind.name not in _SUPPORTED:
        shown = f"number {info.type}" if kind is None else kind.name
        raise UnsupportedModel(f"tensor {info.name} has type {shown}; {', '.join(_SUPPORTED)} are supported")
    return kind


def _size(info: TensorInfo) -> int:
    """Bytes of a tensor in the file."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[_kind(info)]
    return math.prod(info.shape) // block * block_bytes


def _refuse_split(path: Path, metadata: GgufMetadata) -> None:
    count = metadata.integer("split.count") or 1
    if count > 1:
        stem = re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
        first, last = (f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in (1, count))
        raise UnsupportedModel(
            f"{path.name} is one of {count} parts, {first} to {last}; join them with `llama-gguf-split --merge`"
        )
