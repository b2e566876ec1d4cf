"""A tokenizer one can do on paper: a token for each byte, 16 control tokens, no merges; the vocabulary is 272."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twostroke.text.tokenizer import byte_level_alphabet

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|reserved_{at}|>" for at in range(13)))
VOCAB_SIZE = 256 + len(CONTROL_TOKENS)
END_OF_TEXT, IM_START, IM_END = 256, 257, 258  # an answer ends with IM_END
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_tokenizer(
    folder: Path,
    *,
    chat_template: str | list[dict[str, str]] | None = CHATML,
    controls: Sequence[str] = CONTROL_TOKENS,
    bos: str | None = None,
    eos: str = CONTROL_TOKENS[2],
    add_bos: bool | None = None,
) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`; byte b is token b, `controls[i]` is 256 + i."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": chat_template,
        **({} if add_bos is None else {"add_bos_token": add_bos}),
    }
    (folder / "tokenizer.json").write_text(json.dumps(tiny_document(controls)))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def tiny_document(controls: Sequence[str] = CONTROL_TOKENS) -> dict[str, Any]:
    """The tokenizer as JSON of the `tokenizers` library."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": 256 + at, "content": name, **flags, "special": True} for at, name in enumerate(controls)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": dict(byte_level_alphabet()), "merges": []},
    }
