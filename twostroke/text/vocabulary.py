"""Reads a TokenizerBundle from the vocabulary in a GGUF file's metadata.

A byte-level one names the way text was split before merging (`tokenizer.ggml.pre`) and leaves the rule to the reader.
The rules here are those of the models' own tokenizers; merges do the rest. Nothing is guessed: another kind of model or
a name that is not here is an error, since a wrong rule gives other ids for the same text and nobody notices.
"""

from __future__ import annotations

from pathlib import Path

from twostroke.errors import ModelError, UnsupportedModel
from twostroke.gguf import GgufMetadata, end_tokens, read_metadata
from twostroke.text.bundle import ByteRule, TokenizerBundle
from twostroke.text.entries import Entries
from twostroke.text.sealing import Document, seal
from twostroke.text.sentencepiece import adds_space_prefix, sentencepiece_document

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
    model, entries = metadata.text("tokenizer.ggml.model"), Entries.read(metadata)
    match model:
        case "gpt2":
            document, rule, strips = _byte_level_document(metadata, entries), ByteRule.BYTE_LEVEL, False
        case "llama":
            document, rule = sentencepiece_document(metadata, entries), ByteRule.SENTENCEPIECE
            strips = adds_space_prefix(metadata)
        case _:
            raise UnsupportedModel(
                f"GGUF vocabulary of kind {model!r}: only 'gpt2' (byte-level) and 'llama' (SentencePiece) are read, "
                "since others do not say all of how text is split; use the model's folder with tokenizer.json"
            )
    sealed, specials = seal(document)
    bos, adds_bos = metadata.integer("tokenizer.ggml.bos_token_id"), metadata.flag("tokenizer.ggml.add_bos_token")
    return TokenizerBundle(
        tokenizer_json=sealed,
        specials=specials,
        byte_rule=rule,
        strips_leading_space=strips,
        chat_template=metadata.text("tokenizer.chat_template"),
        bos_token_id=bos,
        eos_token_id=metadata.integer("tokenizer.ggml.eos_token_id"),
        # SentencePiece models that do not say are given one, as llama.cpp does.
        add_bos=bos is not None and (rule is ByteRule.SENTENCEPIECE if adds_bos is None else adds_bos),
        end_token_ids=end_tokens(metadata),
    )


def _byte_level_document(metadata: GgufMetadata, entries: Entries) -> Document:
    """The vocabulary as a document of the `tokenizers` library."""
    merges = metadata.strings("tokenizer.ggml.merges")
    if merges is None:
        raise ModelError("the GGUF file has no tokenizer.ggml.merges")
    rule = metadata.text("tokenizer.ggml.pre") or "default"
    prefix_space = bool(metadata.flag("tokenizer.ggml.add_space_prefix"))
    return {
        "version": "1.0",
        "added_tokens": entries.added_tokens(),
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
            "vocab": {piece: id_ for id_, piece in enumerate(entries.pieces)},
            "merges": list(merges),
        },
    }


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
