"""Reads a model's tokenizer, whichever of the two forms the model comes in."""

from __future__ import annotations

from pathlib import Path

from twostroke.text.bundle import TokenizerBundle
from twostroke.text.folder import bundle_from_folder
from twostroke.text.vocabulary import bundle_from_gguf


def load_bundle(path: Path) -> TokenizerBundle:
    """The tokenizer of the model at `path`, a folder of transformers' files or a GGUF file.

    Raises:
        ModelError: a file is damaged, incomplete or contradicts another.
        UnsupportedModel: a kind of tokenizer that is not read here.
    """
    return bundle_from_folder(path) if path.is_dir() else bundle_from_gguf(path)
