"""How many threads torch's own operations take in a pass."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.backends import native_backend
from tests.support.engines import answer, asked
from tests.support.tiny import write_tiny
from twostroke.engine.backend import Backend
from twostroke.engine.backends.choice import Device, choose_backend
from twostroke.engine.backends.native import NativeBackend
from twostroke.engine.backends.torch import TorchBackend
from twostroke.engine.engine import Engine, EngineSettings
from twostroke.engine.mode import WeightMode
from twostroke.engine.models.llama import Llama
from twostroke.engine.weights import load_model
from twostroke.engine.yardstick import torch_threads


async def threads_in_passes(backend: Backend, folder: Path, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """What torch says in each pass of an engine over this backend."""
    seen = set()
    model = load_model(write_tiny(folder), mode=WeightMode.F32, backend=backend)
    logits = Llama.logits

    def counted(of: Llama, hidden: Tensor) -> Tensor:
        seen.add(torch.get_num_threads())
        return logits(of, hidden)

    monkeypatch.setattr(Llama, "logits", counted)
    with torch_threads(torch.get_num_threads()):  # some of its libraries keep the number for the whole process
        async with Engine.start(EngineSettings(pages=9), model.model, model.kv_format()) as engine:
            await answer(engine, asked([1, 2, 3]))
    return seen


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (lambda: native_backend(threads=1), 1),
        (lambda: native_backend(threads=2), 1),
        (lambda: TorchBackend(packs=False), 1),
        (lambda: TorchBackend(packs=False, threads=2), 2),
    ],
    ids=["native", "native, two threads", "torch", "torch, two threads"],
)
async def test_torch_keeps_to_one_thread_beside_our_kernels_and_to_its_bound_without(
    backend: Callable[[], Backend], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await threads_in_passes(backend(), tmp_path, monkeypatch) == {expected}


@pytest.mark.parametrize(("told", "expected"), [(None, 1), (1, 1), (2, 2)])
def test_where_nothing_compiles_the_told_threads_are_those_of_torch(
    told: int | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", shlex.join([sys.executable, "-c", "raise SystemExit(1)"]))
    backend = choose_backend(Device.CPU, threads=told)
    assert not isinstance(backend, NativeBackend)
    assert backend.torch_threads == expected
