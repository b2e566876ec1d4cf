"""Loading weights: nothing missing, nothing unused, nothing random, and every refusal names what is wrong."""

import json
import logging
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.support.forward import all_logits
from tests.support.tiny import Array, Tiny, interleaved, write_tiny, write_tiny_gguf
from twostroke.engine.linear import LinearFactory, has_packed_kernels
from twostroke.engine.loading.gguf_tensors import GgufSource, half_rotation_order
from twostroke.engine.weights import WeightMode, load_model
from twostroke.errors import ModelError, UnsupportedModel
from twostroke.gguf import read_header

TOKENS = list(b"a tiny prompt")
WRITABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
needs_packing = pytest.mark.skipif(not has_packed_kernels(), reason="this build of torch packs no float16 matrices")
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def change(folder: Path, edit: Callable[[dict[str, Array]], object]) -> Path:
    """Rewrite the folder's tensors."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def logits(path: Path) -> torch.Tensor:
    return all_logits(load_model(path, mode=WeightMode.F32), TOKENS)


def write_one_tensor(path: Path, data: Array, kind: gguf.GGMLQuantizationType) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Tied heads


@pytest.mark.parametrize("flag", [True, False])
def test_a_missing_head_is_the_embedding_matrix_whatever_the_flag_says(
    tmp_path: Path, flag: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny(tmp_path / "model", tied=True)
    expected = logits(folder)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": flag}
    (folder / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING):
        found = logits(folder)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert ("lm_head.weight" in caplog.text) == (not flag)


@pytest.mark.parametrize("flag", [True, False])
def test_a_head_in_the_file_is_used_whatever_the_flag_says(tmp_path: Path, flag: bool) -> None:
    folder = write_tiny(tmp_path / "model", tied=False)
    expected = logits(folder)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": flag}
    (folder / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(logits(folder), expected, atol=0, rtol=0)
    assert not load_model(folder, mode=WeightMode.F32).config.tied_embeddings


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_has_a_head_of_its_own_or_ties_it(tmp_path: Path, tied: bool) -> None:
    path, folder = write_tiny_gguf(tmp_path / "m.gguf", tied=tied), write_tiny(tmp_path / "m", tied=tied)
    torch.testing.assert_close(logits(path), logits(folder), atol=1e-5, rtol=0)
    assert load_model(path, mode=WeightMode.F16).config.tied_embeddings == tied


# Completeness


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"]
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    folder = change(write_tiny(tmp_path), lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=f"tensor {name} is missing"):
        load_model(folder, mode=WeightMode.F16)


def test_an_unused_tensor_is_named(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    folder = change(write_tiny(tmp_path), lambda tensors: tensors.update({name: np.zeros(64, np.float32)}))
    with pytest.raises(ModelError, match=f"no part of the model uses: {name}"):
        load_model(folder, mode=WeightMode.F16)


def test_the_rotary_buffers_of_old_exports_are_harmless(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = change(write_tiny(tmp_path), lambda tensors: tensors.update({name: np.zeros(8, np.float32)}))
    assert logits(folder).isfinite().all()


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    folder = change(write_tiny(tmp_path), lambda tensors: tensors.update({name: np.zeros((64, 64), np.float32)}))
    with pytest.raises(ModelError, match=rf"{name} has shape \[64, 64\]; the configuration needs \[64, 128\]"):
        load_model(folder, mode=WeightMode.F16)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    def poison(tensors: dict[str, Array]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value

    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN or infinite"):
        load_model(change(write_tiny(tmp_path), poison), mode=WeightMode.F32)


def test_values_beyond_float16_are_refused_in_that_mode_only(tmp_path: Path) -> None:
    def enlarge(tensors: dict[str, Array]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = 7e4

    folder = change(write_tiny(tmp_path), enlarge)
    load_model(folder, mode=WeightMode.F32)
    with pytest.raises(ModelError, match="beyond float16"):
        load_model(folder, mode=WeightMode.F16)


def test_a_path_that_holds_no_model_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model at"):
        load_model(tmp_path / "absent", mode=WeightMode.F16)
    with pytest.raises(ModelError, match=r"cannot read config\.json"):
        load_model(tmp_path, mode=WeightMode.F16)


# Safetensors


def shard(folder: Path, *, missing: str | None = None) -> Path:
    """Split a folder's tensors over two files with an index, and lose one of them."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{1 + at % 2:05d}-of-00002.safetensors" for at, name in enumerate(tensors)}
    for file in set(weight_map.values()) - {missing}:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_shards_load_as_one_file_does(tmp_path: Path) -> None:
    whole, sharded = write_tiny(tmp_path / "whole"), shard(write_tiny(tmp_path / "sharded"))
    torch.testing.assert_close(logits(sharded), logits(whole), atol=0, rtol=0)


def test_a_missing_shard_is_named_before_anything_is_read(tmp_path: Path) -> None:
    lost = "model-00002-of-00002.safetensors"
    folder = shard(write_tiny(tmp_path), missing=lost)
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"damaged as well")
    with pytest.raises(ModelError, match=f"files that are not there: {lost}"):
        load_model(folder, mode=WeightMode.F16)


def test_an_index_that_disagrees_with_a_shard_is_refused(tmp_path: Path) -> None:
    folder = shard(write_tiny(tmp_path))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"disagree on model\.norm\.weight"):
        load_model(folder, mode=WeightMode.F16)


def test_an_index_cannot_point_out_of_its_folder(tmp_path: Path) -> None:
    folder = shard(write_tiny(tmp_path))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": "../../etc/passwd"}}))
    with pytest.raises(ModelError, match="outside the folder"):
        load_model(folder, mode=WeightMode.F16)


@pytest.mark.parametrize("size", [0, 100, -1])
def test_a_cut_file_is_a_typed_error(tmp_path: Path, size: int) -> None:
    folder = write_tiny(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"cannot read model\.safetensors"):
        load_model(folder, mode=WeightMode.F16)


def test_an_integer_tensor_is_unsupported_by_name_and_dtype(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    tensors = {**load_file(folder / "model.safetensors"), "model.norm.weight": np.ones(64, np.int8)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"tensor model\.norm\.weight has dtype I8"):
        load_model(folder, mode=WeightMode.F16)


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="only pickled weights"):
        load_model(folder, mode=WeightMode.F16)


# GGUF


def test_a_scale_that_is_not_finite_is_refused_by_tensor(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf", quantization=gguf.GGMLQuantizationType.Q4_1)
    raw = bytearray(path.read_bytes())
    embeddings = next(each for each in read_header(path).tensors if each.name == "token_embd.weight")
    raw[embeddings.offset : embeddings.offset + 2] = np.float16("nan").tobytes()
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight holds NaN"):
        load_model(path, mode=WeightMode.F16)


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
        load_model(parts[0], mode=WeightMode.F16)


def test_a_gguf_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ModelError, match="the file is cut short"):
        load_model(path, mode=WeightMode.F16)


def test_a_gguf_tensor_nobody_uses_is_named(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load_model(path, mode=WeightMode.F16)


# Values


@pytest.mark.parametrize("packs", [pytest.param(True, marks=needs_packing), False])
def test_matrices_of_mode_f16_multiply_with_exactly_the_rounded_values(packs: bool) -> None:
    spread = 10.0 ** torch.arange(-9, 4)  # down to numbers that float16 holds as subnormals or zero
    weight = torch.randn(13, 96, generator=torch.Generator().manual_seed(0)) * spread.unsqueeze(1)
    factory = LinearFactory(WeightMode.F16, packs=packs)
    product = factory.linear("w", weight)(torch.eye(96))
    torch.testing.assert_close(product.T, weight.half().float(), atol=0, rtol=0)
    torch.testing.assert_close(factory.embedding("w", weight), weight.half(), atol=0, rtol=0)


@needs_packing
def test_packed_and_plain_kernels_agree_to_rounding_on_few_and_many_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(130, 576, generator=generator), torch.randn(130, generator=generator)
    packed, plain = (LinearFactory(WeightMode.F16, packs=each).linear("w", weight, bias) for each in (True, False))
    for rows in (1, 2, 7, 64):
        x = torch.randn(rows, 576, generator=generator)
        torch.testing.assert_close(packed(x), plain(x), atol=1e-4, rtol=1e-5)


def test_a_processor_without_packed_kernels_says_so_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        factory = LinearFactory(WeightMode.F16, packs=False)
        factory.linear("w", torch.ones(2, 2))
        LinearFactory(WeightMode.F32, packs=False)
    assert [record.getMessage() for record in caplog.records if "no packed float16 kernels" in record.getMessage()] == [
        "no packed float16 kernels here: float32 kernels run on the rounded weights"
    ]


def test_the_digest_follows_values_and_arithmetic_and_nothing_else(tmp_path: Path) -> None:
    def digest(path: Path, mode: WeightMode = WeightMode.F32) -> bytes:
        return load_model(path, mode=mode).weights_digest

    first = digest(write_tiny(tmp_path / "first"))
    assert len(first) == 16
    assert digest(write_tiny(tmp_path / "copy"), WeightMode.F16) == first
    assert digest(write_tiny(tmp_path / "other", seed=1)) != first
    assert digest(write_tiny(tmp_path / "rope", theta=20_000.0)) != first


def test_the_kv_format_names_the_model_and_its_mode(tmp_path: Path) -> None:
    loaded, tiny = load_model(write_tiny(tmp_path / "model"), mode=WeightMode.F16), Tiny()
    form = loaded.kv_format(block_tokens=8)
    assert form.block_shape == (tiny.layers, 2, 8, tiny.kv_heads, tiny.head_dim)
    assert (form.weight_mode, form.weights_digest) == ("f16", loaded.weights_digest)
    assert form.rope_digest == loaded.config.rope.digest
