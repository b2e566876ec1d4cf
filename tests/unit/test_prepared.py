"""Prepared files: the same parts bit for bit, in a file that any reader opens, and never damaged ones."""

import json
import logging
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from tests.support.backends import CPU
from tests.support.forward import all_logits
from tests.support.tiny import write_tiny
from tests.support.tiny_gguf import write_tiny_gguf
from twostroke.engine.loading.checkpoint import Checkpoint
from twostroke.engine.loading.draft import Draft, needed_bytes
from twostroke.engine.loading.folder import folder_config
from twostroke.engine.loading.parts import CheckpointParts, Parts
from twostroke.engine.loading.prepared import Damaged, PreparedFile, PreparedParts, prepared_name
from twostroke.engine.loading.shards import SafetensorsSource
from twostroke.engine.loading.shelf import WeightsCache
from twostroke.engine.matrix import Matrix, WeightMode
from twostroke.engine.models.registry import FAMILIES
from twostroke.engine.weights import load_model
from twostroke.errors import ModelError

TOKENS = list(b"a tiny prompt")
MODES = list(WeightMode)
OWN: dict[str, dict[str, Any]] = {"llama": {"attention_bias": True}, "gemma3": {"window": 8}}
T = TypeVar("T")


class Heard:
    """Passes parts on, and keeps them by what was asked for."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.tensors: dict[str, Tensor | None] = {}

    def has(self, name: str) -> bool:
        return self._parts.has(name)

    def matrix(self, *pieces: tuple[str, int], columns: int, bias: bool = False) -> Matrix:
        matrix = self._parts.matrix(*pieces, columns=columns, bias=bias)
        self.tensors |= {f"{pieces} {name}": getattr(matrix, name) for name in ("values", "scales", "bias")}
        return matrix

    def vector(self, name: str, size: int) -> Tensor:
        vector = self.tensors[name] = self._parts.vector(name, size)
        return vector

    def layers(self, build: Callable[[int], T], count: int) -> tuple[T, ...]:
        return self._parts.layers(build, count)


class NamesOnly:
    """A source whose tensors must not be read."""

    def __init__(self, source: SafetensorsSource) -> None:
        self.shapes, self.files = source.shapes, source.files

    def read(self, name: str) -> Tensor:
        pytest.fail(f"{name} was read")


@pytest.fixture
def cache(tmp_path: Path) -> WeightsCache:
    return WeightsCache(folder=tmp_path / "cache" / "weights", settle_seconds=0)


def only_file(cache: WeightsCache) -> Path:
    (found,) = cache.folder.glob("*.safetensors*")
    return found


def logits(path: Path, mode: WeightMode, cache: WeightsCache | None = None) -> Tensor:
    return all_logits(load_model(path, mode=mode, backend=CPU, cache=cache), TOKENS)


# Values


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_parts_of_every_family_come_back_bit_for_bit_and_no_tensor_is_read(
    tmp_path: Path, cache: WeightsCache, family: str, mode: WeightMode
) -> None:
    family = family.removesuffix("_text")
    folder = write_tiny(tmp_path / "model", family=family, tied=family == "gemma3", **OWN.get(family, {}))
    config, source = folder_config(folder), SafetensorsSource(folder)
    read = Heard(CheckpointParts(Checkpoint(source), mode))
    FAMILIES[config.architecture](config, read, CPU)

    load_model(folder, mode=mode, backend=CPU, cache=cache)
    file = PreparedFile(only_file(cache))
    mapped = Heard(PreparedParts(file, Checkpoint(NamesOnly(source)), mode))
    FAMILIES[config.architecture](config, mapped, CPU)

    assert mapped.tensors.keys() == read.tensors.keys()
    for name, expected in read.tensors.items():
        found = mapped.tensors[name]
        assert (found is None) == (expected is None), name
        if expected is not None and found is not None:
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), name
            assert found.data_ptr() % 64 == 0, name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_the_load_that_prepares_and_the_one_that_maps_compute_what_a_plain_load_does(
    tmp_path: Path, cache: WeightsCache, mode: WeightMode, tied: bool
) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf", tied=tied)
    plain = load_model(path, mode=mode, backend=CPU)
    for _ in range(2):
        loaded = load_model(path, mode=mode, backend=CPU, cache=cache)
        assert loaded.config == plain.config
        assert loaded.kv_format() == plain.kv_format()
        assert torch.equal(all_logits(loaded, TOKENS), all_logits(plain, TOKENS))


def test_any_reader_of_safetensors_opens_a_prepared_file(tmp_path: Path, cache: WeightsCache) -> None:
    folder = write_tiny(tmp_path / "model", family="qwen2", layers=1)
    load_model(folder, mode=WeightMode.INT8, backend=CPU, cache=cache)
    with safe_open(only_file(cache), framework="pt") as file:
        assert file.metadata()["identity"] == only_file(cache).name
    found = safetensors.torch.load_file(only_file(cache))
    own = safetensors.torch.load_file(folder / "model.safetensors")
    attention = "model.layers.0.self_attn."
    fused = "+".join(f"{attention}{part}_proj" for part in "qkv")
    assert found[f"{fused}.values"].dtype == torch.int8
    assert found[f"{fused}.scales"].shape == found[f"{fused}.values"].shape[:1]
    assert torch.equal(found[f"{fused}.bias"], torch.cat([own[f"{attention}{part}_proj.bias"] for part in "qkv"]))
    assert torch.equal(found["model.norm.weight"], own["model.norm.weight"])


def test_a_mode_has_a_file_of_its_own(tmp_path: Path, cache: WeightsCache) -> None:
    folder = write_tiny(tmp_path / "model")
    digest = load_model(folder, mode=WeightMode.F16, backend=CPU, cache=cache).weights_digest
    load_model(folder, mode=WeightMode.INT8, backend=CPU, cache=cache)
    assert {path.name for path in cache.folder.glob("*.safetensors")} == {
        prepared_name(digest, mode) for mode in (WeightMode.F16, WeightMode.INT8)
    }


# Damage


def cut(raw: bytearray) -> None:
    del raw[-100:]


def grow(raw: bytearray) -> None:
    raw += bytes(100)


def empty(raw: bytearray) -> None:
    raw.clear()


def flip_a_value(raw: bytearray) -> None:
    raw[-5] ^= 4


def flip_a_shape(raw: bytearray) -> None:
    at = raw.index(b'"shape": [') + 10
    raw[at] = ord("1") if raw[at] != ord("1") else ord("2")


def lose_the_end_of_the_header(raw: bytearray) -> None:
    raw[:8] = struct.pack("<Q", 1_000)


def promise_a_huge_header(raw: bytearray) -> None:
    raw[:8] = struct.pack("<Q", 1 << 60)


def claim_to_be_another(raw: bytearray) -> None:
    raw[:] = raw.replace(b"-f16-1.safetensors", b"-f32-1.safetensors")


DAMAGES = [cut, grow, empty, flip_a_value, flip_a_shape]
DAMAGES += [lose_the_end_of_the_header, promise_a_huge_header, claim_to_be_another]


@pytest.mark.parametrize("harm", DAMAGES)
def test_a_damaged_file_is_noticed_and_made_anew(
    tmp_path: Path, cache: WeightsCache, harm: Callable[[bytearray], None], caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny(tmp_path / "model")
    expected = logits(folder, WeightMode.F16, cache)
    sound = only_file(cache).read_bytes()
    raw = bytearray(sound)
    harm(raw)
    only_file(cache).write_bytes(raw)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits(folder, WeightMode.F16, cache), expected)
    assert "prepared weights are damaged" in caplog.text
    assert contents(only_file(cache)) == contents_of(sound, tmp_path)


def contents(path: Path) -> dict[str, bytes]:
    return {name: each.view(torch.uint8).numpy().tobytes() for name, each in tensors(path)}


def contents_of(raw: bytes, folder: Path) -> dict[str, bytes]:
    (folder / "sound.safetensors").write_bytes(raw)
    return contents(folder / "sound.safetensors")


def tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """All but what aligns others, which depends on the order they came in."""
    for name, tensor in safetensors.torch.load_file(path).items():
        if not name.startswith("gap."):
            yield name, tensor


def test_a_file_of_another_model_under_this_name_is_refused(tmp_path: Path, cache: WeightsCache) -> None:
    load_model(write_tiny(tmp_path / "model"), mode=WeightMode.F16, backend=CPU, cache=cache)
    path = only_file(cache)
    other = path.rename(path.with_name(prepared_name(bytes(16), WeightMode.F16)))
    with pytest.raises(Damaged, match=f"it was made as {path.name}"):
        PreparedFile(other)


def test_a_file_without_a_part_that_the_family_asks_for_is_made_anew(tmp_path: Path, cache: WeightsCache) -> None:
    folder = write_tiny(tmp_path / "model", layers=1)
    digest = load_model(folder, mode=WeightMode.F16, backend=CPU, cache=cache).weights_digest
    expected = contents(only_file(cache))
    only_file(cache).unlink()
    with closing(draft_of(cache, prepared_name(digest, WeightMode.F16), folder)) as draft:
        draft.add("model.norm.weight", torch.ones(64))
        draft.publish()
    load_model(folder, mode=WeightMode.F16, backend=CPU, cache=cache)
    assert contents(only_file(cache)) == expected


def draft_of(cache: WeightsCache, name: str, folder: Path) -> Draft:
    size, header_bytes = needed_bytes(SafetensorsSource(folder).shapes, WeightMode.F16)
    draft = cache.claim(name, size=size, header_bytes=header_bytes)
    assert isinstance(draft, Draft)
    return draft


# Making


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_prepared_file_takes_no_more_than_was_announced(
    tmp_path: Path, cache: WeightsCache, family: str, mode: WeightMode
) -> None:
    folder = write_tiny(tmp_path / "model", family=family)
    load_model(folder, mode=mode, backend=CPU, cache=cache)
    size, header_bytes = needed_bytes(SafetensorsSource(folder).shapes, mode)
    raw = only_file(cache).read_bytes()
    assert len(raw) <= size + header_bytes + 4_096  # the header is rounded up to a page
    assert len(json.dumps(json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]]))) <= header_bytes


def test_a_header_without_room_gives_the_draft_up(
    tmp_path: Path, cache: WeightsCache, caplog: pytest.LogCaptureFixture
) -> None:
    assert cache.is_usable()
    draft = cache.claim("m.safetensors", size=1 << 20, header_bytes=0)
    assert isinstance(draft, Draft)
    with closing(draft):
        for index in range(200):
            draft.add(f"tensor {index}", torch.zeros(2, 3))
        draft.publish()
    assert "its header takes" in caplog.records[-1].why  # type: ignore[attr-defined]
    assert not list(cache.folder.iterdir())


def test_a_model_that_is_refused_leaves_nothing_to_map(tmp_path: Path, cache: WeightsCache) -> None:
    folder = write_tiny(tmp_path / "model")
    own = safetensors.torch.load_file(folder / "model.safetensors")
    own["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    safetensors.torch.save_file(own, folder / "model.safetensors")
    for _ in range(2):
        with pytest.raises(ModelError, match="holds NaN"):
            load_model(folder, mode=WeightMode.F16, backend=CPU, cache=cache)
    assert not list(cache.folder.glob("*.safetensors*"))
