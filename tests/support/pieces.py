"""Small SentencePiece vocabularies as GGUF keys, learned from the corpus, and a textbook encoder for them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import gguf

from tests.support.texts import corpus
from twostroke.gguf import GgufMetadata
from twostroke.text.entries import Kind

SPACE = "\u2581"
CONTROLS = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
BOS = 2
UNITS = ("\n\n", "\t\t", *(" " * count for count in (2, 3, 4)), "</div>")  # of Gemma: text, found before merging
_MERGES = 250


def vocabulary(*, units: Sequence[str] = (), prefix: bool) -> GgufMetadata:
    """Like Gemma's with `units`, like Llama 2's with a `prefix`: a space before every text."""
    characters = sorted({*"".join(_learned())} | {*"".join(corpus(80)).replace(" ", SPACE)} - {"\0"})
    taken = {unit.replace(" ", SPACE) for unit in units}
    learned = [piece for piece in (*_learned(), *characters) if piece not in taken]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    groups = ((CONTROLS, Kind.CONTROL), (units, Kind.USER_DEFINED), (bytes_, Kind.BYTE), (learned, Kind.NORMAL))
    pieces = [(piece, Kind.UNKNOWN if piece == "<unk>" else kind) for group, kind in groups for piece in group]
    ranks = [-float(rank) for rank in range(len(learned))]
    return GgufMetadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tuple(piece for piece, _ in pieces),
            "tokenizer.ggml.token_type": tuple(int(kind) for _, kind in pieces),
            "tokenizer.ggml.scores": (*(0.0,) * (len(pieces) - len(ranks)), *ranks),
            "tokenizer.ggml.bos_token_id": BOS,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.unknown_token_id": 3,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.ggml.add_space_prefix": prefix,
        }
    )


@cache
def _learned() -> tuple[str, ...]:
    """The most frequent pair of neighbours within words, joined again and again (arXiv:1508.07909)."""
    found = [re.findall(f"{SPACE}*[^{SPACE}]*", text.replace(" ", SPACE)) for text in corpus(200)]
    words = Counter(tuple(word) for text in found for word in text if word)
    learned: list[str] = []
    while len(learned) < _MERGES:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in words.items():
            for pair in pairwise(word):
                pairs[pair] += times
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        if "".join(best) not in learned:
            learned.append("".join(best))
        words = Counter({_merged(word, best): times for word, times in words.items()})
    return tuple(learned)


def _merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    parts: list[str] = []
    for part in word:
        if parts and (parts[-1], part) == pair:
            parts[-1] += part
        else:
            parts.append(part)
    return tuple(parts)


class Textbook:
    """SentencePiece's BPE by its definition (arXiv:1808.06226), one join at a time; control tokens are text to it."""

    def __init__(self, metadata: GgufMetadata) -> None:
        pieces = metadata.strings("tokenizer.ggml.tokens") or ()
        kinds = metadata.integers("tokenizer.ggml.token_type") or ()
        scores = metadata.numbers("tokenizer.ggml.scores") or ()
        self._ids = {piece: id_ for id_, piece in enumerate(pieces)}
        self._scores = {piece: scores[id_] for piece, id_ in self._ids.items() if kinds[id_] == Kind.NORMAL}
        units = [piece for piece, id_ in self._ids.items() if kinds[id_] == Kind.USER_DEFINED]
        self._units = re.compile("|".join(map(re.escape, sorted(units, key=len, reverse=True))) or "(?!)")
        self._prefix = SPACE if metadata.flag("tokenizer.ggml.add_space_prefix") else ""

    def encode(self, text: str) -> list[int]:
        """Units first, then what lies between them."""
        ids, at = [], 0
        for unit in self._units.finditer(text):
            ids += [*self._between(text[at : unit.start()]), self._ids[unit[0]]]
            at = unit.end()
        return ids + self._between(text[at:])

    def _between(self, text: str) -> list[int]:
        parts = joined(self._prefix + text.replace(" ", SPACE), self._scores) if text else []
        return [id_ for part in parts for id_ in self._ids_of(part)]

    def _ids_of(self, part: str) -> list[int]:
        if part in self._scores:
            return [self._ids[part]]
        return [self._ids[f"<0x{byte:02X}>"] for byte in part.encode()]


def joined(text: str, scores: Mapping[str, float]) -> list[str]:
    """Join the two neighbours that make the piece of the highest score, leftmost first, until no two make one."""
    parts = list(text)
    while made := [(scores[one + two], -at) for at, (one, two) in enumerate(pairwise(parts)) if one + two in scores]:
        at = -max(made)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    return parts


def write_vocabulary(path: Path, metadata: GgufMetadata, *, architecture: str) -> Path:
    """Write a GGUF file with these keys and no tensors; returns `path`."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        writer.add_key_value(key, list(value) if isinstance(value, tuple) else value, *_kinds(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _kinds(value: object) -> tuple[gguf.GGUFValueType, gguf.GGUFValueType | None]:
    """The types under which a file holds a value: its own, and that of its items."""
    if isinstance(value, tuple):
        return gguf.GGUFValueType.ARRAY, _kinds(value[0])[0]
    names = {bool: "BOOL", int: "INT32", float: "FLOAT32", str: "STRING"}
    return gguf.GGUFValueType[names[type(value)]], None
