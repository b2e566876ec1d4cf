"""Reads a TokenizerBundle from the vocabulary in a GGUF file's metadata.

A GGUF file names the way text was split before merging (`tokenizer.ggml.pre`) and leaves the rule itself to the reader.
The rules here are those of the models' own tokenizers; merges do the rest. Nothing is guessed: another kind of model or
a name that is not here is an error, since a wrong rule gives other ids for the same text and nobody notices.
"""

from __future__ import annotations

from pathlib import Path

from twostroke.errors import ModelError, UnsupportedModel
from twostroke.gguf import GgufMetadata, read_metadata
from twostroke.text.bundle import ByteRule, TokenizerBundle
from twostroke.text.sealing import Document, seal

_CONTROL, _USER_DEFINED = 3, 4  # token types: matched as units, shown or not
_END_KEYS = ("eos", "eot", "eom")

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (  # {digits} is how many digits stay together
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"

# Name in the file -> patterns that split one after the other. Each name is that of the model the rule was made for;
# the rest are models whose rule is the same.
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "olmo", "phi-2"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), (_LLAMA3.format(digits="{1,3}"),)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_LLAMA3.format(digits=""),)),
    "default": (_PUNCTUATION, _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3"})  # a word that is an entry is not merged again
_COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen"})  # text is brought to Unicode's NFC first


def bundle_from_gguf(path: Path) -> TokenizerBundle:
    """The tokenizer in the GGUF file at `path`; raises as `bundle_from_metadata`, and ModelError for a damaged file."""
    return bundle_from_metadata(read_metadata(path))


def bundle_from_metadata(metadata: GgufMetadata) -> TokenizerBundle:
    """The tokenizer that `metadata` describes.

    Raises:
        ModelError: a key is missing or the vocabulary contradicts itself.
        UnsupportedModel: a kind of vocabulary or a splitting rule that is not known here, by name.
    """
    model = metadata.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedModel(
            f"GGUF vocabulary of kind {model!r}: only 'gpt2' (byte-level BPE) is read, since other kinds leave out "
            "their merges and normalization; use the model's folder with tokenizer.json"
        )
    document = _document(metadata)
    sealed, specials = seal(document)
    bos, eos, *others = (metadata.integer(f"tokenizer.ggml.{key}_token_id") for key in ("bos", *_END_KEYS))
    return TokenizerBundle(
        tokenizer_json=sealed,
        specials=specials,
        byte_rule=ByteRule.BYTE_LEVEL,
        chat_template=metadata.text("tokenizer.chat_template"),
        bos_token_id=bos,
        eos_token_id=eos,
        add_bos=bool(metadata.flag("tokenizer.ggml.add_bos_token")) and bos is not None,
        end_token_ids=frozenset(end for end in (eos, *others) if end is not None),
    )


def _document(metadata: GgufMetadata) -> Document:
    """The vocabulary as a document of the `tokenizers` library."""
    pieces = _required(metadata.strings("tokenizer.ggml.tokens"), "tokens")
    merges = _required(metadata.strings("tokenizer.ggml.merges"), "merges")
    types = metadata.integers("tokenizer.ggml.token_type") or (1,) * len(pieces)
    if len(types) != len(pieces) or len(set(pieces)) != len(pieces):
        raise ModelError("the GGUF vocabulary has entries twice, or not a type for each")
    rule = metadata.text("tokenizer.ggml.pre") or "default"
    prefix_space = bool(metadata.flag("tokenizer.ggml.add_space_prefix"))
    return {
        "version": "1.0",
        "added_tokens": [
            _added(id_, piece, kind)
            for id_, (piece, kind) in enumerate(zip(pieces, types, strict=True))
            if kind in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if rule in _COMPOSED else None,
        "pre_tokenizer": _pre_tokenizer(rule, prefix_space=prefix_space),
        "decoder": _byte_level(prefix_space=False),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": rule in _WHOLE_WORDS_FIRST,
            "vocab": {piece: id_ for id_, piece in enumerate(pieces)},
            "merges": list(merges),
        },
    }


def _required(value: tuple[str, ...] | None, key: str) -> tuple[str, ...]:
    if value is None:
        raise ModelError(f"the GGUF file has no tokenizer.ggml.{key}")
    return value


def _added(id_: int, piece: str, kind: int) -> Document:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id_, "content": piece, **flags, "special": kind == _CONTROL}


def _pre_tokenizer(rule: str, *, prefix_space: bool) -> Document:
    if (patterns := _SPLITS.get(rule)) is None:
        raise UnsupportedModel(f"GGUF pre-tokenizer {rule!r}; known are {', '.join(sorted(_SPLITS))}")
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, _byte_level(prefix_space=prefix_space)]}


def _byte_level(*, prefix_space: bool) -> Document:
    return {"type": "ByteLevel", "add_prefix_space": prefix_space, "trim_offsets": True, "use_regex": False}
