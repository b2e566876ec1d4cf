"""Writes a model's tokenizer the way transformers reads it, so that load tools count tokens as the model does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from twostroke.launcher.refusal import Refusal
from twostroke.text.bundle import TokenizerBundle, sealed_name

CONFIG = "tokenizer_config.json"


def export_tokenizer(bundle: TokenizerBundle, folder: Path) -> tuple[Path, ...]:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json; returns their paths.

    Raises: Refusal, when the folder cannot be written to.
    """
    document = unsealed(bundle)
    roles = _roles(bundle, document)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": bundle.chat_template,
        **roles,
    }
    files = {"tokenizer.json": document, CONFIG: config, "special_tokens_map.json": roles}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
    except OSError as error:
        raise Refusal(f"cannot write to {folder}: {error.strerror}", "name another folder") from error
    return tuple(folder / name for name in files)


def unsealed(bundle: TokenizerBundle) -> dict[str, Any]:
    """The document of the `tokenizers` library, with the real names of control tokens, and BOS where it belongs."""
    real = {sealed_name(special.id): _in_json(special.text) for special in bundle.specials}
    text = bundle.tokenizer_json.decode()
    if real:
        text = re.sub("|".join(map(re.escape, real)), lambda match: real[match[0]], text)
    document: dict[str, Any] = json.loads(text)
    if bundle.add_bos and bundle.bos_token_id is not None and bundle.bos_token is not None:
        document["post_processor"] = _bos_first(bundle.bos_token, bundle.bos_token_id)
    return document


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _bos_first(name: str, id_: int) -> dict[str, Any]:
    bos = {"SpecialToken": {"id": name, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [id_], "tokens": [name]}},
    }


def _roles(bundle: TokenizerBundle, document: dict[str, Any]) -> dict[str, str]:
    told = {
        "bos_token": bundle.bos_token,
        "eos_token": bundle.eos_token,
        "unk_token": document["model"].get("unk_token"),
    }
    return {role: name for role, name in told.items() if name}
