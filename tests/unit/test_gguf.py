"""The GGUF header reader: right on sound files, typed and bounded on damaged ones."""

import contextlib
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.errors import ModelError, UnsupportedModel
from twostroke.gguf import MAX_ARRAY_ITEMS, read_header, read_metadata


def write(path: Path, *, alignment: int | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(0.5)
    writer.add_add_bos_token(True)
    writer.add_token_list(["a", "é", "<|im_end|>"])
    writer.add_token_types([1, 1, 3])
    writer.add_tensor("one", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("two", np.arange(4, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def header(*pairs: bytes, tensors: int = 0, version: int = 3, count: int | None = None) -> bytes:
    pair_count = len(pairs) if count is None else count
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pair_count) + b"".join(pairs)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def pair(key: str, kind: int, payload: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + payload


def test_every_type_of_value_reads_back(tmp_path: Path) -> None:
    metadata = read_metadata(write(tmp_path / "model.gguf"))
    assert metadata.text("general.architecture") == "llama"
    assert metadata.integer("llama.block_count") == 2
    assert metadata.number("llama.attention.layer_norm_rms_epsilon") == 0.5
    assert metadata.flag("tokenizer.ggml.add_bos_token") is True
    assert metadata.strings("tokenizer.ggml.tokens") == ("a", "é", "<|im_end|>")
    assert metadata.integers("tokenizer.ggml.token_type") == (1, 1, 3)
    assert metadata.integer("absent") is None


def test_a_key_of_another_type_is_refused_by_name(tmp_path: Path) -> None:
    metadata = read_metadata(write(tmp_path / "model.gguf"))
    with pytest.raises(ModelError, match="add_bos_token holds bool, not int"):
        metadata.integer("tokenizer.ggml.add_bos_token")
    with pytest.raises(ModelError, match=r"tokens is not an array of int"):
        metadata.integers("tokenizer.ggml.tokens")


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_tensors_are_found_at_any_alignment(tmp_path: Path, alignment: int | None) -> None:
    path = write(tmp_path / "model.gguf", alignment=alignment)
    one, two = read_header(path).tensors
    raw = path.read_bytes()
    assert (one.name, one.shape, two.shape) == ("one", (2, 3), (4,))
    assert np.frombuffer(raw, np.float32, 6, one.offset).tolist() == list(range(6))
    assert np.frombuffer(raw, np.float16, 4, two.offset).tolist() == list(range(4))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot read"),
        (b"GGML" + bytes(60), "does not start with GGUF"),
        (header(count=1 << 60), "are needed"),
        (header(tensors=1 << 60), "are needed"),
        (header(pair("k", 8, struct.pack("<Q", 1 << 62))), "are needed"),
        (header(pair("k", 9, struct.pack("<IQ", 0, 1 << 62))), "an array of"),
        (header(pair("k", 9, struct.pack("<IQ", 8, MAX_ARRAY_ITEMS))), "are needed"),
        (header(pair("k", 9, struct.pack("<IQ", 9, 1) + bytes(64))), "unknown value type 9"),
        (header(pair("k", 77, bytes(8))), "unknown value type 77"),
        (header(pair("k", 8, struct.pack("<Q", 1) + b"\xff")), "not UTF-8"),
        (header(pair("k", 7, b"\1"), pair("k", 7, b"\1")), "occurs twice"),
        (header(pair("general.alignment", 4, struct.pack("<I", 48))), "not a power of two"),
        (header(struct.pack("<Q", 1) + b"t" + struct.pack("<I", 1 << 31), tensors=1, count=0), "dimensions"),
        (
            header(string("t") + struct.pack("<IQIQ", 1, 8, 0, 1 << 40), tensors=1, count=0),
            "past the file's end",
        ),
    ],
)
def test_a_damaged_file_is_a_typed_error_that_names_the_damage(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_header(path)


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_another_version_or_byte_order_is_unsupported(tmp_path: Path, version: int) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(header(version=version))
    with pytest.raises(UnsupportedModel, match="versions 2 and 3"):
        read_header(path)


@settings(deadline=None, max_examples=150)
@given(position=st.integers(0, 400), value=st.integers(0, 255), cut=st.integers(0, 800))
def test_no_flipped_byte_or_cut_escapes_the_error_tree(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int, cut: int
) -> None:
    path = write(tmp_path_factory.mktemp("fuzz") / "model.gguf")
    raw = bytearray(path.read_bytes())
    raw[position % len(raw)] = value
    path.write_bytes(raw[: len(raw) - cut % len(raw)])
    with contextlib.suppress(ModelError):
        read_header(path)
