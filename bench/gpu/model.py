"""A model of SmolLM2's shape with seeded weights, and a tokenizer to go with it: nothing has to be brought along."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors.numpy import save_file

from bench.gpu.ground import Ground
from tests.support.tiny import Tiny
from tests.support.tiny_tokenizer import CONTROL_TOKENS, IM_END, VOCAB_SIZE, tiny_document, write_tiny_tokenizer


@dataclass(frozen=True, kw_only=True)
class Shaped(Tiny):
    """Tiny's weights at any size of the feed-forward."""

    wide: int

    @property
    def inner(self) -> int:
        """Rows of the gate."""
        return self.wide


def write_model(ground: Ground) -> Path:
    """Write the folder unless it is there: 135M parameters, or a few for a rehearsal."""
    folder = ground.model
    if (folder / "complete").exists():
        return folder
    shape = Shaped(
        layers=ground.size(30, 2),
        hidden=ground.size(576, 128),
        heads=ground.size(9, 2),
        kv_heads=ground.size(3, 1),
        wide=ground.size(1_536, 192),
        vocab=49_152,
        max_positions=8_192,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config()))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [IM_END]}))
    save_file(shape.tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder, shape.vocab)
    (folder / "complete").touch()
    return folder


def _write_tokenizer(folder: Path, size: int) -> None:
    """A token for each byte, and words that no text is cut into, so that every id has a text."""
    write_tiny_tokenizer(folder)
    document = tiny_document()
    document["model"]["vocab"] |= {
        name: VOCAB_SIZE - len(CONTROL_TOKENS) + at for at, name in enumerate(CONTROL_TOKENS)
    }
    document["model"]["vocab"] |= {f"Ġw{number}": number for number in range(VOCAB_SIZE, size)}
    (folder / "tokenizer.json").write_text(json.dumps(document))
