"""SentencePiece vocabularies of GGUF files against SentencePiece, transformers, and the textbook.

The golden digests are BLAKE2b-128 of all ids, as little-endian u32, that SentencePiece 0.2.3 gave for the corpus with a
model of these pieces and scores: BPE, byte fallback, identity normalization, spaces escaped and never removed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.chat_templates import GEMMA_CHAT
from tests.support.pieces import BOS, CONTROLS, UNITS, Textbook, vocabulary, write_vocabulary
from tests.support.texts import corpus
from twostroke.errors import ModelError, UnsupportedModel
from twostroke.gguf import GgufMetadata
from twostroke.text.detokenizer import Detokenizer
from twostroke.text.entries import Kind
from twostroke.text.loading import load_bundle
from twostroke.text.segment import Segment
from twostroke.text.template import ChatTemplate
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.vocabulary import bundle_from_metadata

TEXTS = corpus(controls=CONTROLS)


@dataclass(frozen=True)
class Style:
    metadata: GgufMetadata
    tokenizer: Tokenizer
    golden: str

    @classmethod
    def of(cls, metadata: GgufMetadata, golden: str) -> Style:
        return cls(metadata, Tokenizer(bundle_from_metadata(metadata)), golden)


GEMMA = Style.of(vocabulary(units=UNITS, prefix=False), "e809f0cf0f8b172d99cdf33f5a613bac")
LLAMA2 = Style.of(vocabulary(prefix=True), "a7ca646340f4b68c29456ca3c928ca23")
each_style = pytest.mark.parametrize("style", [GEMMA, LLAMA2], ids=["gemma", "llama 2"])


@each_style
def test_ids_are_those_of_sentencepiece(style: Style) -> None:
    ids = [id_ for text in TEXTS for id_ in style.tokenizer.encode(text, allow_special=False)]
    assert blake2b(struct.pack(f"<{len(ids)}I", *ids), digest_size=16).hexdigest() == style.golden


@each_style
@given(text=st.text(st.sampled_from("ab <|end>\n\t0,.exampledonît'é\u2581▁中\0"), max_size=40))
def test_ids_are_those_of_the_textbook(style: Style, text: str) -> None:
    if style is GEMMA:  # a unit is looked for in the text as it was written
        text = text.replace("\u2581", " ")
    assert style.tokenizer.encode(text, allow_special=False) == Textbook(style.metadata).encode(text)


@pytest.mark.parametrize(("architecture", "prefix"), [("gemma3", False), ("llama", True)])
def test_ids_are_those_of_transformers(tmp_path: Path, architecture: str, prefix: bool) -> None:
    from transformers import AutoTokenizer

    path = write_vocabulary(tmp_path / "model.gguf", vocabulary(prefix=prefix), architecture=architecture)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    ours = Tokenizer(load_bundle(path))
    # Transformers puts no space before a text that begins with one, nor behind a control token; SentencePiece does.
    texts = [text for text in corpus(controls=()) if not text.startswith(" ")] if prefix else TEXTS
    for text in texts:
        ids = ours.encode(text, allow_special=True)
        assert ids == theirs(text, add_special_tokens=False).input_ids, text


@each_style
def test_text_comes_back_whole_and_in_pieces(style: Style) -> None:
    for text in TEXTS:
        ids = style.tokenizer.encode(text, allow_special=False)
        alone, after = (Detokenizer(style.tokenizer, after_text=after) for after in (False, True))
        assert style.tokenizer.decode(ids) == text
        assert "".join(alone.push([id_]) for id_ in ids) + alone.finish() == text
        streamed = "".join(after.push([id_]) for id_ in ids) + after.finish()
        assert streamed == (f" {text}" if style is LLAMA2 and text else text)


@each_style
def test_control_tokens_come_from_text_that_may_name_them_alone(style: Style) -> None:
    for id_, name in enumerate(CONTROLS):
        assert id_ in style.tokenizer.encode(f"a{name}b", allow_special=True)
        assert not {*range(len(CONTROLS))} & {*style.tokenizer.encode(f"a{name}b", allow_special=False)}


def test_units_are_found_before_merging_longest_first() -> None:
    found = GEMMA.tokenizer.encode("a" + " " * 7 + "</div>\n\n\n", allow_special=False)
    assert b"|".join(map(GEMMA.tokenizer.token_bytes, found)) == b"a|    |   |</div>|\n\n|\n"


def test_units_that_the_file_spells_with_its_own_space_are_the_same() -> None:
    pieces = GEMMA.metadata.strings("tokenizer.ggml.tokens") or ()
    spelled = tuple(piece.replace(" ", "\u2581") for piece in pieces)
    again = bundle_from_metadata(GgufMetadata({**GEMMA.metadata, "tokenizer.ggml.tokens": spelled}))
    assert again == GEMMA.tokenizer.bundle


def test_a_file_that_does_not_say_gets_bos_and_a_leading_space_as_sentencepiece_has_them() -> None:
    silent = {"tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_space_prefix"}
    tokenizer = Tokenizer(
        bundle_from_metadata(GgufMetadata({key: LLAMA2.metadata[key] for key in LLAMA2.metadata.keys() - silent}))
    )
    assert tokenizer.encode_prompt([Segment("the", False)]) == [
        BOS,
        *LLAMA2.tokenizer.encode("the", allow_special=False),
    ]


def test_the_end_of_a_turn_ends_an_answer_though_no_key_names_it() -> None:
    assert GEMMA.tokenizer.bundle.end_token_ids == {1, CONTROLS.index("<end_of_turn>")}


def test_a_conversation_with_gemma_renders_and_encodes() -> None:
    metadata = GgufMetadata({**GEMMA.metadata, "tokenizer.chat_template": GEMMA_CHAT.source})
    tokenizer = Tokenizer(bundle_from_metadata(metadata))
    template = ChatTemplate.from_bundle(tokenizer.bundle)
    turns = [{"role": "system", "content": "kind"}, {"role": "user", "content": "a <end_of_turn>"}]
    ids = tokenizer.encode_prompt(template.render(turns))
    named = "".join(tokenizer.control_name(id_) or tokenizer.token_bytes(id_).decode() for id_ in ids)
    assert named == "<bos><start_of_turn>user\nkind\n\na <end_of_turn><end_of_turn>\n<start_of_turn>model\n"
    assert [ids.count(id_) for id_ in (BOS, 4, 5)] == [1, 2, 1]


def test_unused_pieces_that_no_merge_could_make_are_never_made() -> None:
    padded = _with("[PAD0]", Kind.UNUSED, GEMMA.metadata)
    for text in (*TEXTS[:200], "[PAD0]", "x[PAD0]y"):
        ours = Tokenizer(bundle_from_metadata(padded)).encode(text, allow_special=True)
        assert ours == GEMMA.tokenizer.encode(text, allow_special=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "scores"),
        ({"scores": (0.0,)}, "scores"),
        (
            {"token_type": (1,) * len(GEMMA.metadata.strings("tokenizer.ggml.tokens") or ())},
            "no piece for 256 of the bytes, 0x00 the first",
        ),
    ],
)
def test_a_damaged_vocabulary_is_refused(changes: dict[str, tuple[int, ...] | None], message: str) -> None:
    values = {**GEMMA.metadata, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    with pytest.raises(ModelError, match=message):
        bundle_from_metadata(GgufMetadata({key: value for key, value in values.items() if value is not None}))


def test_what_is_not_done_here_is_refused_by_name() -> None:
    for metadata, name in (
        (GgufMetadata({**GEMMA.metadata, "tokenizer.ggml.remove_extra_whitespaces": True}), "extra_whitespaces"),
        (_with("themthe", Kind.UNUSED, _with("them", Kind.NORMAL, GEMMA.metadata)), "unused piece 'themthe'"),
    ):
        with pytest.raises(UnsupportedModel, match=name):
            bundle_from_metadata(metadata)


def _with(piece: str, kind: Kind, metadata: GgufMetadata) -> GgufMetadata:
    """The vocabulary with one entry more."""
    more = {"tokens": piece, "token_type": int(kind), "scores": -1_000.0}
    values = {key: (*metadata[f"tokenizer.ggml.{key}"], value) for key, value in more.items()}  # type: ignore[misc]
    return GgufMetadata({**metadata, **{f"tokenizer.ggml.{key}": value for key, value in values.items()}})
