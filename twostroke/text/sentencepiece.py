"""The SentencePiece vocabulary of a GGUF file (`tokenizer.ggml.model` is "llama") as a `tokenizers` document.

The file holds pieces and scores. SentencePiece's BPE joins, again and again, the two neighbours that make the piece of
the highest score (arXiv:1808.06226; bpe_model.cc); ordering all pairs that make a piece by its score says the same in
merges. Pieces marked as user-defined stand in the text as they are: they are found first and never made by merging.
"""

from __future__ import annotations

from twostroke.errors import ModelError, UnsupportedModel
from twostroke.gguf import GgufMetadata
from twostroke.text.entries import Entries, Kind
from twostroke.text.sealing import Document

_SPACE = "\u2581"  # what a space is in a piece


def sentencepiece_document(metadata: GgufMetadata, entries: Entries) -> Document:
    """The vocabulary of `metadata`, whose entries are `entries`.

    Raises:
        ModelError: the scores are missing, or bytes without a piece of their own.
        UnsupportedModel: the file asks for a normalization that is not done here, or merging makes an unused piece.
    """
    scores = metadata.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(entries.pieces):
        raise ModelError("the GGUF file has no tokenizer.ggml.scores, or not one for each entry")
    if metadata.flag("tokenizer.ggml.remove_extra_whitespaces"):
        raise UnsupportedModel("tokenizer.ggml.remove_extra_whitespaces is not supported")
    _refuse_unused_that_arise(entries)
    entries = _with_plain_spaces(entries)
    vocabulary = {piece: id_ for id_, piece in enumerate(entries.pieces)}
    bytes_ = entries.ids_of(Kind.BYTE)
    missing = [byte for byte in range(256) if vocabulary.get(f"<0x{byte:02X}>") not in bytes_]
    if missing:
        raise ModelError(
            f"the GGUF vocabulary has no piece for {len(missing)} of the bytes, {missing[0]:#04x} the first"
        )
    return {
        "version": "1.0",
        "added_tokens": entries.added_tokens(),
        "normalizer": _normalizer(prefix=adds_space_prefix(metadata)),
        "pre_tokenizer": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": _merges(entries, scores),
        },
    }


def adds_space_prefix(metadata: GgufMetadata) -> bool:
    """Say whether a text begins with a space that is not its own; files that are silent mean yes."""
    return metadata.flag("tokenizer.ggml.add_space_prefix") is not False


def _refuse_unused_that_arise(entries: Entries) -> None:
    """Let pass what only fills the vocabulary up; SentencePiece splits an unused piece again once it has made it."""
    unused = {entries.pieces[id_] for id_ in entries.ids_of(Kind.UNUSED)}
    known = unused | {entries.pieces[id_] for id_ in entries.ids_of(Kind.NORMAL)}
    for piece in sorted(unused):
        if len(piece) == 1 or any({piece[:cut], piece[cut:]} <= known for cut in range(1, len(piece))):
            raise UnsupportedModel(f"the unused piece {piece!r} of the GGUF vocabulary can arise from others")


def _with_plain_spaces(entries: Entries) -> Entries:
    """Spell the spaces of user-defined pieces as text does: they are looked for before it is normalized."""
    plain = entries.ids_of(Kind.USER_DEFINED)
    return Entries(
        tuple(piece.replace(_SPACE, " ") if id_ in plain else piece for id_, piece in enumerate(entries.pieces)),
        entries.kinds,
    )


def _normalizer(*, prefix: bool) -> Document:
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    if not prefix:
        return replace
    return {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, replace]}


def _merges(entries: Entries, scores: tuple[float, ...]) -> list[list[str]]:
    """All pairs of normal pieces that make a normal piece: the best piece first, and of its pairs the longest left."""
    normal = {entries.pieces[id_] for id_ in entries.ids_of(Kind.NORMAL)}
    best_first = sorted(entries.ids_of(Kind.NORMAL), key=lambda id_: (-scores[id_], id_))
    return [
        [piece[:cut], piece[cut:]]
        for piece in map(entries.pieces.__getitem__, best_first)
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in normal and piece[cut:] in normal
    ]
