"""Takes a `tokenizers` document and gives its control tokens names that no text can hold; see `bundle`."""

from __future__ import annotations

import json
from typing import Any

import tokenizers

from twostroke.errors import ModelError, UnsupportedModel
from twostroke.text.bundle import SEAL, ByteRule, SpecialToken, sealed_name, special_tokens

Document = dict[str, Any]  # the JSON of the `tokenizers` library


def seal(document: Document) -> tuple[bytes, tuple[SpecialToken, ...]]:
    """Rename the control tokens of `document`, leave out what only whole-text encoding needs, and try the result.

    Truncation and padding go (a prompt is never cut in silence), and the post-processor goes (BOS is
    `TokenizerBundle.add_bos`).

    Raises:
        ModelError: the document is not consistent, for instance two tokens with one id.
        UnsupportedModel: a kind of model or control token whose text cannot be kept plain.
    """
    controls = [token for token in document.get("added_tokens", ()) if token["special"]]
    names = {token["content"]: sealed_name(token["id"]) for token in controls}
    for token in controls:
        if token["single_word"]:  # matched or not by its neighbours, which a sealed name cannot see
            raise UnsupportedModel(f"control token {token['content']!r} asks to be matched as a single word")
    sealed = {
        **document,
        "truncation": None,
        "padding": None,
        "post_processor": None,
        "added_tokens": [_renamed(token, names) for token in document.get("added_tokens", ())],
        "model": _sealed_model(document["model"], names),
    }
    raw = json.dumps(sealed, ensure_ascii=False, separators=(",", ":")).encode()
    if raw.count(SEAL.encode()) > 3 * len(names):  # added token, vocabulary entry, unknown token
        raise ModelError("the vocabulary holds reserved characters")
    _try(raw, sealed["added_tokens"])
    return raw, special_tokens((token["id"], token["content"]) for token in controls)


def byte_rule(document: Document) -> tuple[ByteRule, bool]:
    """How entries stand for bytes, and whether decoding drops one leading space.

    Raises: UnsupportedModel, for decoders of other families (WordPiece and the like).
    """
    decoder = document.get("decoder") or {}
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type"): step for step in steps}
    if "ByteLevel" in kinds:
        return ByteRule.BYTE_LEVEL, False
    if "Metaspace" in kinds:
        return ByteRule.SENTENCEPIECE, kinds["Metaspace"].get("prepend_scheme", "always") != "never"
    if "ByteFallback" in kinds:
        return ByteRule.SENTENCEPIECE, kinds.get("Strip", {}).get("start", 0) > 0
    raise UnsupportedModel(f"tokenizer decoder {sorted(map(str, kinds))}; byte-level and SentencePiece are supported")


def _renamed(token: Document, names: dict[str, str]) -> Document:
    if not token["special"]:
        return token
    return {**token, "content": names[token["content"]], "normalized": False}


def _sealed_model(model: Document, names: dict[str, str]) -> Document:
    """The model with sealed vocabulary entries, and without merges that would produce one."""
    kind = model.get("type", "BPE")
    if kind == "BPE":
        merges = [merge for merge in model["merges"] if not _touches(merge, names)]
        vocabulary: object = {names.get(piece, piece): id_ for piece, id_ in model["vocab"].items()}
        changed = {"vocab": vocabulary, "merges": merges}
    elif kind == "Unigram":
        changed = {"vocab": [[names.get(piece, piece), score] for piece, score in model["vocab"]]}
    else:
        raise UnsupportedModel(f"tokenizer model {kind}; BPE and Unigram are supported")
    unknown = model.get("unk_token")
    return model | changed | ({"unk_token": names.get(unknown, unknown)} if unknown else {})


def _touches(merge: str | list[str], names: dict[str, str]) -> bool:
    parts = merge.split(" ") if isinstance(merge, str) else merge
    return not names.keys().isdisjoint((*parts, "".join(parts)))


def _try(raw: bytes, added: list[Document]) -> None:
    """Raise ModelError unless `tokenizers` loads `raw` and gives every added token the id the document says."""
    try:
        loaded = tokenizers.Tokenizer.from_buffer(raw)
    except ValueError as error:
        raise ModelError(f"the tokenizer cannot be loaded: {error}") from error
    for token in added:
        if (found := loaded.token_to_id(token["content"])) != token["id"]:
            raise ModelError(f"token {token['id']} of the tokenizer is loaded as {found}")
