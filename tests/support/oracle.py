"""transformers as the judge of logits: an independent implementation over the same files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from twostroke.engine.weights import WeightMode

_OPTIONS: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}


class Oracle:
    """A transformers model in float32; its matrices may be rounded as a weight mode says."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        self._exact = [parameter.data for parameter in model.parameters()]

    @classmethod
    def folder(cls, folder: Path) -> Oracle:
        """Load a Hugging Face folder."""
        return cls(AutoModelForCausalLM.from_pretrained(folder, **_OPTIONS, local_files_only=True))

    @classmethod
    def gguf(cls, path: Path) -> Oracle:
        """Load a GGUF file by transformers' own reader, dequantizer and name map."""
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        model = AutoModelForCausalLM.from_config(config, **_OPTIONS)  # type: ignore[no-untyped-call]
        read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)  # type: ignore[no-untyped-call]
        absent = model.load_state_dict(read["tensors"], strict=False).missing_keys
        if absent and not (absent == ["lm_head.weight"] and config.tie_word_embeddings):
            raise ValueError(f"transformers read no {absent}")
        model.tie_weights()
        return cls(model)

    def round(self, mode: WeightMode) -> Oracle:
        """Round every matrix once, in place, whatever it was rounded to before."""
        for parameter, exact in zip(self._model.parameters(), self._exact, strict=True):
            parameter.data = rounded(exact, mode) if exact.ndim == 2 else exact
        return self

    def save(self, folder: Path) -> Path:
        """Write the model as transformers does; returns `folder`."""
        self._model.save_pretrained(folder)
        return folder

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Score every position of `tokens`: float32 [n, vocab]."""
        with torch.no_grad():
            scored: Tensor = self._model(torch.tensor([list(tokens)])).logits[0]
        return scored


def rounded(matrix: Tensor, mode: WeightMode) -> Tensor:
    """The numbers, as float32, that a mode makes of a matrix [N, K]: its definition in a line."""
    match mode:
        case WeightMode.F32:
            return matrix
        case WeightMode.F16:
            return matrix.half().float()
        case WeightMode.BF16:
            return matrix.bfloat16().float()
        case WeightMode.INT8:
            scale = matrix.abs().max(dim=1, keepdim=True).values / 127
            return torch.round(matrix / scale).nan_to_num() * scale  # a row of zeros stays one
