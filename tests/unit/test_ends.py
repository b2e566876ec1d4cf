"""Embeddings that are the output head too are one matrix in memory."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.backends import native_backend
from tests.support.emulated import emulated_package
from tests.support.tiny import write_tiny
from twostroke.engine.backends.flashinfer import FlashInferBackend
from twostroke.engine.loading.checkpoint import Checkpoint
from twostroke.engine.loading.folder import folder_config
from twostroke.engine.loading.parts import CheckpointParts
from twostroke.engine.loading.prepared import PreparedFile
from twostroke.engine.loading.shards import SafetensorsSource
from twostroke.engine.loading.shelf import WeightsCache
from twostroke.engine.matrix import Matrix, WeightMode
from twostroke.engine.models.ends import load_ends
from twostroke.engine.weights import load_model

VOCAB, HIDDEN = 400, 176  # of no other model that tests load


def vocabularies() -> set[int]:
    """Where in memory there are matrices of this size."""
    gc.collect()
    found = (each for each in gc.get_objects() if type(each) is Tensor)
    return {each.data_ptr() for each in found if each.shape == (VOCAB, HIDDEN)}


@pytest.mark.parametrize("mode", WeightMode)
@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_is_held_once_for_both_ends(tmp_path: Path, tied: bool, mode: WeightMode) -> None:
    folder, before = write_tiny(tmp_path / "model", hidden=HIDDEN, vocab=VOCAB, tied=tied), vocabularies()
    loaded = load_model(folder, mode=mode, backend=native_backend())
    assert len(vocabularies() - before) == (1 if tied else 2)
    assert loaded.config.tied_embeddings == tied


@pytest.mark.parametrize("huge", [True, False])
def test_a_vocabulary_in_a_prepared_file_is_copied_once_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, huge: bool
) -> None:
    folder, cache = write_tiny(tmp_path / "model", hidden=HIDDEN, vocab=VOCAB), WeightsCache(folder=tmp_path / "cache")
    load_model(folder, mode=WeightMode.F16, backend=native_backend(), cache=cache)
    mapped: list[int] = []

    def take(file: PreparedFile, name: str, *shape: int) -> Tensor:
        tensor = taken(file, name, *shape)
        mapped.append(tensor.data_ptr())
        return tensor

    taken = PreparedFile.take
    monkeypatch.setattr(PreparedFile, "take", take)
    monkeypatch.setattr("twostroke.engine.loading.prepared.in_huge_pages", lambda mapping: huge)
    before = vocabularies()
    loaded = load_model(folder, mode=WeightMode.F16, backend=native_backend(), cache=cache)
    (kept,) = vocabularies() - before
    assert (kept in mapped) == huge
    assert loaded.config.tied_embeddings


def test_a_vocabulary_is_brought_to_a_device_once_for_both_ends(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    config, source = folder_config(folder), SafetensorsSource(folder)
    elsewhere = FlashInferBackend(emulated_package(), torch.device("meta"), torch.bfloat16)
    ends = load_ends(config, CheckpointParts(Checkpoint(source), WeightMode.BF16), elsewhere)
    assert ends.head._weight is ends.embed._weight  # type: ignore[attr-defined]
    assert ends.head._weight.device.type == "meta"  # type: ignore[attr-defined]


def test_what_is_placed_is_not_copied_again() -> None:
    backend, matrix = native_backend(), Matrix(torch.ones(32, 64, dtype=torch.float16))
    placed = backend.placed(matrix)
    assert placed.values.data_ptr() != matrix.values.data_ptr()
    assert backend.placed(placed) is placed
    assert torch.equal(placed.values, matrix.values)
