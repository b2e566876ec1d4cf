"""Reads a TokenizerBundle from a model folder as transformers writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from twostroke.errors import ModelError, UnsupportedModel
from twostroke.text.bundle import TokenizerBundle
from twostroke.text.sealing import Document, byte_rule, seal

MAX_FILE_BYTES = 128 << 20
DEFAULT_TEMPLATE = "default"  # the name of a model's general template where it has several


def bundle_from_folder(path: Path) -> TokenizerBundle:
    """The tokenizer of the model in folder `path`.

    Reads `tokenizer.json` and, where they exist, `tokenizer_config.json`, `special_tokens_map.json`,
    `chat_template.jinja` (which wins over a template in the configuration), `config.json` and `generation_config.json`.

    Raises:
        ModelError: a file is damaged or contradicts another.
        UnsupportedModel: there is no `tokenizer.json`, or it is of an unsupported kind.
    """
    try:
        return _read(path)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"the tokenizer files of {path.name} are not as transformers writes them: {error!r}"
        ) from error


def _read(path: Path) -> TokenizerBundle:
    document = _json(path / "tokenizer.json")
    if document is None:
        raise UnsupportedModel(f"{path.name} has no tokenizer.json; other tokenizer files are not read")
    config = (_json(path / "special_tokens_map.json") or {}) | (_json(path / "tokenizer_config.json") or {})
    if not isinstance(document.get("model"), dict) or not document["model"].get("vocab"):
        raise ModelError(f"tokenizer.json of {path.name} has no vocabulary")
    rule, strips_leading_space = byte_rule(document)
    document = {**document, "added_tokens": _added_tokens(document, config)}
    sealed, specials = seal(document)
    ids = _ids(document)
    model, generation = (_json(path / name) or {} for name in ("config.json", "generation_config.json"))
    bos = _first([ids.get(_name(config.get("bos_token"))), *_integers(model.get("bos_token_id"))])
    eos = _first([ids.get(_name(config.get("eos_token"))), *_integers(model.get("eos_token_id"))])
    ends = {eos, *_integers(model.get("eos_token_id")), *_integers(generation.get("eos_token_id"))}
    return TokenizerBundle(
        tokenizer_json=sealed,
        specials=specials,
        byte_rule=rule,
        strips_leading_space=strips_leading_space,
        chat_template=_chat_template(path, config),
        bos_token_id=bos,
        eos_token_id=eos,
        add_bos=_adds_bos(document, config, bos),
        end_token_ids=frozenset(end for end in ends if end is not None),
    )


def _json(path: Path) -> dict[str, Any] | None:
    """The object in file `path`; None, if there is no such file."""
    if not path.is_file():
        return None
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ModelError(f"{path.name} is larger than {MAX_FILE_BYTES} bytes")
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} is not a JSON object")
    return value


def _added_tokens(document: Document, config: dict[str, Any]) -> list[Document]:
    """The document's added tokens, with those and the roles that only the configuration knows."""
    added = {token["content"]: token for token in document.get("added_tokens", ())}
    for id_, token in config.get("added_tokens_decoder", {}).items():
        known = added.get(token["content"], {"id": int(id_), "single_word": False, "lstrip": False, "rstrip": False})
        added[token["content"]] = {**known, **token, "id": known["id"]}
    vocabulary = _ids(document)
    for name in _special_names(config):
        if name in added:
            added[name] = {**added[name], "special": True}
        elif name in vocabulary:  # such as "<s>", an entry of the model that was never added
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added[name] = {"id": vocabulary[name], "content": name, **flags, "special": True}
    return sorted(added.values(), key=lambda token: int(token["id"]))


def _special_names(config: dict[str, Any]) -> set[str]:
    """Names that the configuration uses as control tokens."""
    named = [value for key, value in config.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(key) or ()
        named += more.values() if isinstance(more, dict) else more
    return {_name(each) for each in named} - {""}


def _name(token: object) -> str:
    """A token's text, given as that or as an object; "" when there is none."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _ids(document: Document) -> dict[str, int]:
    vocabulary = document["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: pieces with their scores, in id order
        vocabulary = {piece: id_ for id_, (piece, _) in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in document.get("added_tokens", ())}}


def _integers(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, int)]


def _first(values: Iterable[int | None]) -> int | None:
    return next((value for value in values if value is not None), None)


def _adds_bos(document: Document, config: dict[str, Any], bos: int | None) -> bool:
    """What the configuration says; if it is silent, what the document's own post-processor does."""
    if isinstance(declared := config.get("add_bos_token"), bool):
        return declared and bos is not None
    probe = tokenizers.Tokenizer.from_str(json.dumps({**document, "truncation": None, "padding": None}))
    return bos is not None and bool(probe.encode("", add_special_tokens=True).ids[:1] == [bos])


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    if (file := path / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {each["name"]: each["template"] for each in template}
        template = named.get(DEFAULT_TEMPLATE)
        if template is None:
            raise ModelError(f"chat templates {sorted(named)}, but none named {DEFAULT_TEMPLATE}")
    return template
