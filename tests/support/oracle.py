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
        """Round every matrix once, in place."""
        if mode is WeightMode.F16:
            for parameter in self._model.parameters():
                parameter.data = parameter.data.half().float() if parameter.ndim == 2 else parameter.data
        return self

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Score every position of `tokens`: float32 [n, vocab]."""
        with torch.no_grad():
            scored: Tensor = self._model(torch.tensor([list(tokens)])).logits[0]
        return scored
