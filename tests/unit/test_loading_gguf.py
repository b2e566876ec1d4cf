"""Loading GGUF files: every tensor type bit for bit, alignment, row order, and what is refused."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tests.support.backends import CPU
from tests.support.forward import all_logits
from tests.support.tiny import Array
from tests.support.tiny_gguf import interleaved, write_tiny_gguf
from twostroke.engine.loading.gguf_tensors import GgufSource, half_rotation_order
from twostroke.engine.weights import WeightMode, load_model
from twostroke.errors import ModelError, UnsupportedModel
from twostroke.gguf import read_header

TOKENS = list(b"a tiny prompt")
WRITABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def logits(path: Path) -> torch.Tensor:
    return all_logits(load_model(path, mode=WeightMode.F32, backend=CPU), TOKENS)


def write_one_tensor(path: Path, data: Array, kind: gguf.GGMLQuantizationType) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_scale_that_is_not_finite_is_refused_by_tensor(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf", quantization=gguf.GGMLQuantizationType.Q4_1)
    raw = bytearray(path.read_bytes())
    embeddings = next(each for each in read_header(path).tensors if each.name == "token_embd.weight")
    raw[embeddings.offset : embeddings.offset + 2] = np.float16("nan").tobytes()
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight holds NaN"):
        load_model(path, mode=WeightMode.F16, backend=CPU)


@pytest.mark.parametrize("name", WRITABLE)
def test_a_tensor_of_each_writable_type_dequantizes_bit_for_bit(tmp_path: Path, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    values = np.random.default_rng(1).standard_normal((600, 512)).astype(np.float32)  # more than one slab
    packed = gguf.quants.quantize(values, kind)
    expected = gguf.quants.dequantize(packed.view(np.uint8), kind)
    found = GgufSource(write_one_tensor(tmp_path / "t.gguf", packed, kind)).read("t").numpy()
    assert found.shape == (600, 512)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", K_QUANTS)
def test_a_tensor_of_each_k_quant_dequantizes_bit_for_bit(tmp_path: Path, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(2).integers(0, 256, (600, 512 // block * size), dtype=np.uint8)
    packed = random & 0xBF  # without the top exponent bit every float16 in it is finite
    expected = gguf.quants.dequantize(packed, kind)
    found = GgufSource(write_one_tensor(tmp_path / "t.gguf", packed, kind)).read("t").numpy()
    assert found.shape == (600, 512)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", ["IQ4_NL", "I32", "TQ1_0"])
def test_another_type_is_unsupported_by_tensor_and_type(tmp_path: Path, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    path = write_one_tensor(tmp_path / "t.gguf", np.zeros((2, 256 // block * size), np.uint8), kind)
    with pytest.raises(UnsupportedModel, match=f"tensor t has type {name}"):
        GgufSource(path)


def test_an_unknown_type_number_is_unsupported(tmp_path: Path) -> None:
    path = write_one_tensor(tmp_path / "t.gguf", np.zeros((2, 32), np.float32), gguf.GGMLQuantizationType.F32)
    raw = path.read_bytes()
    old, new = (b"t" + struct.pack("<IQQI", 2, 32, 2, kind) for kind in (0, 999))
    path.write_bytes(raw.replace(old, new))
    with pytest.raises(UnsupportedModel, match="type number 999"):
        GgufSource(path)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("shape", [(64, 24), (64,)])
def test_interleaved_rows_come_back_in_half_rotation_order(heads: int, shape: tuple[int, ...]) -> None:
    rows = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    found = half_rotation_order(torch.from_numpy(interleaved(rows, heads)), heads)
    np.testing.assert_array_equal(found.numpy(), rows)


@pytest.mark.parametrize("alignment", [8, 64, 4_096])
def test_any_alignment_loads_the_same_values(tmp_path: Path, alignment: int) -> None:
    usual = write_tiny_gguf(tmp_path / "usual.gguf")
    aligned = write_tiny_gguf(tmp_path / "aligned.gguf", alignment=alignment)
    aligned.write_bytes(aligned.read_bytes() + bytes(1_000))  # padding at the end is harmless
    torch.testing.assert_close(logits(aligned), logits(usual), atol=0, rtol=0)


def test_a_part_of_a_split_file_is_refused_and_the_parts_are_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=1)
    for name in ("one", "two"):
        writer.add_tensor(name, np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("*.gguf"))
    with pytest.raises(UnsupportedModel, match=f"one of 2 parts, {parts[0].name} to {parts[-1].name}"):
        load_model(parts[0], mode=WeightMode.F16, backend=CPU)


def test_a_gguf_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ModelError, match="the file is cut short"):
        load_model(path, mode=WeightMode.F16, backend=CPU)


def test_a_gguf_tensor_nobody_uses_is_named(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf", layers=3)
    three, two = (b"llama.block_count" + struct.pack("<II", 4, layers) for layers in (3, 2))
    path.write_bytes(path.read_bytes().replace(three, two))
    with pytest.raises(ModelError, match=r"no part of the model uses: model\.layers\.2\.input_layernorm\.weight"):
        load_model(path, mode=WeightMode.F16, backend=CPU)


def test_a_gguf_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load_model(path, mode=WeightMode.F16, backend=CPU)


def test_one_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name in ("output_norm.weight", "model.norm.weight"):
        writer.add_tensor(name, np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"holds model\.norm\.weight under two names"):
        GgufSource(path)
