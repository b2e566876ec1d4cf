"""Which file builds which architecture. The names are those of `model_type` in a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping

from twostroke.engine.models import Builder, gemma3, llama, qwen3

FAMILIES: Mapping[str, Builder] = {
    "llama": llama.build,
    "mistral": llama.build,
    "qwen2": llama.build,
    "qwen3": qwen3.build,
    "gemma3_text": gemma3.build,
}
