"""Recorded steps equal eager ones bit for bit, and what cannot be recorded runs as it is written."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.backends import native_backend
from tests.support.tiny import write_tiny
from twostroke.engine.attention import AttentionBackend, Plan
from twostroke.engine.attention.native import NativeAttention
from twostroke.engine.backend import Backend
from twostroke.engine.batch import Batch, Segment, build_batch
from twostroke.engine.cache import KvCache
from twostroke.engine.forward import EagerForward
from twostroke.engine.models import Begun
from twostroke.engine.models.llama import Llama
from twostroke.engine.native.build import load_kernels
from twostroke.engine.native.library import NotRecordable
from twostroke.engine.native.recorded import RecordedForward
from twostroke.engine.native.tape import record
from twostroke.engine.weights import LoadedModel, WeightMode, load_model

PAGES, PAGE_TOKENS, SEQUENCES = 1_121, 4, 70
FAMILIES = {"llama": {}, "qwen2": {}, "qwen3": {}, "gemma3": {"window": 7, "layers": 3}}

ENDS: dict[str, Callable[[Backend, Begun], Tensor]] = {
    "normed": lambda backend, begun: backend.rms_norm(begun[0], begun[0][0], 1e-5),
    "fewer columns": lambda backend, begun: begun[0][:, :32],
    "the turns": lambda backend, begun: begun[1],
}
# In a process that has not loaded what other tests load.
RECORDING = """
import sys
from pathlib import Path

import torch

from twostroke.engine.batch import Segment, build_batch
from twostroke.engine.backends.native import NativeBackend
from twostroke.engine.cache import KvCache
from twostroke.engine.forward import EagerForward
from twostroke.engine.native.build import load_kernels
from twostroke.engine.native.recorded import RecordedForward
from twostroke.engine.weights import WeightMode, load_model

loaded = load_model(Path(sys.argv[1]), mode=WeightMode.INT8, backend=NativeBackend(load_kernels(), threads=1))
cache = KvCache(loaded.kv_format(block_tokens=4), 4)
attention = loaded.model.backend.attention(cache, loaded.config.attention)
forward = RecordedForward(loaded.model, attention, EagerForward(loaded.model, attention), most_tokens=8)
before = set(sys.modules)
with torch.inference_mode():
    forward.prepare()
    forward(build_batch([Segment((1, 2), 0, (1,), sample=True)], 4))
print("played" if forward.memory else "not recorded", *(set(sys.modules) - before))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    native_backend()  # skips where nothing compiles
    return tmp_path_factory.mktemp("recorded")


@cache
def tiny(folder: Path, family: str, mode: WeightMode, processor: str = "native", *, threads: int = 1) -> LoadedModel:
    model = write_tiny(folder / family, family=family, **FAMILIES[family])
    return load_model(model, mode=mode, backend=native_backend(processor, threads=threads))


class Counted:
    """An EagerForward that counts its steps."""

    def __init__(self, forward: EagerForward) -> None:
        self._forward = forward
        self.steps = 0

    def prepare(self) -> None:
        self._forward.prepare()

    def __call__(self, batch: Batch) -> Tensor:
        self.steps += 1
        return self._forward(batch)


class Steps:
    """The same steps over two caches: as the model is written, and recorded."""

    def __init__(self, loaded: LoadedModel, *, attending: Backend | None = None, most_tokens: int = 128) -> None:
        self.caches = [KvCache(loaded.kv_format(block_tokens=PAGE_TOKENS), PAGES) for _ in range(2)]
        backend = attending or loaded.model.backend
        over = [backend.attention(cache, loaded.config.attention) for cache in self.caches]
        assert isinstance(over[1], NativeAttention)
        self.eager = EagerForward(loaded.model, over[0])
        self.beside = Counted(EagerForward(loaded.model, over[1]))
        self.recorded = RecordedForward(loaded.model, over[1], self.beside, most_tokens=most_tokens)
        with torch.inference_mode():
            self.recorded.prepare()
        self._lengths = [0] * SEQUENCES

    def run(self, counts: Sequence[int]) -> Tensor:
        """Run so many further tokens of each sequence both ways; what comes out and what is kept must be equal."""
        each = PAGES // SEQUENCES
        segments = [
            Segment(
                [(7 * row + length + at) % 256 for at in range(count)],
                length,
                range(1 + row * each, 1 + (row + 1) * each),
                sample=True,
            )
            for row, (count, length) in enumerate(zip(counts, self._lengths, strict=False))
            if count
        ]
        self._lengths = [a + b for a, b in zip(self._lengths, [*counts, *[0] * SEQUENCES], strict=False)]
        batch = build_batch(segments, PAGE_TOKENS)
        with torch.inference_mode():
            expected, given = self.eager(batch), self.recorded(batch)
        assert torch.equal(given, expected)
        assert torch.equal(self.caches[1].data, self.caches[0].data)
        return expected


@pytest.mark.parametrize("mode", [WeightMode.F16, WeightMode.INT8])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    chunk=st.integers(2, 12),
)
def test_steps_of_any_sequences_are_the_same_played_and_eager(
    folder: Path, family: str, mode: WeightMode, rows: list[int], chunk: int
) -> None:
    steps = Steps(tiny(folder, family, mode), most_tokens=16)
    for count in rows:
        steps.run([1] * count)
    steps.run([chunk, 1])
    steps.run([1, chunk])
    assert steps.beside.steps == 0


@pytest.mark.parametrize("processor", ["native", "x86-64-v3", "x86-64-v4"])
def test_steps_of_few_and_of_many_tokens_do_not_mix(folder: Path, processor: str) -> None:
    steps = Steps(tiny(folder, "llama", WeightMode.INT8, processor, threads=2))
    for count in (1, 64, 3, 65, 1, 40, 3, 66, 33, 2):
        steps.run([1] * count)


def test_steps_beyond_what_is_recorded_run_as_they_are_written(folder: Path) -> None:
    steps = Steps(tiny(folder, "llama", WeightMode.INT8), most_tokens=3)
    for count in (3, 5, 4, 9, 1):
        steps.run([1] * count)
    assert steps.beside.steps == 2  # of 5 and of 9


def test_a_model_that_does_more_than_call_kernels_runs_as_it_is_written(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        steps = Steps(tiny(folder, "llama", WeightMode.F32))  # whose products are torch's
    assert caplog.text.count("steps are not recorded: linear is not a call of the kernels") == 1
    for count in (2, 2, 5):
        steps.run([1] * count)
    assert steps.beside.steps == 3


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_model_whose_layers_return_other_memory_runs_as_it_is_written(
    folder: Path, end: Callable[[Backend, Begun], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    loaded = tiny(folder, "llama", WeightMode.INT8)

    class Ending(Llama):
        def layers(self, begun: Begun, attention: AttentionBackend, plan: Plan) -> Tensor:
            return end(self.backend, (super().layers(begun, attention, plan), *begun[1:]))

    ending = Ending.__new__(Ending)
    ending.__dict__.update(vars(loaded.model))
    with caplog.at_level(logging.INFO):
        steps = Steps(replace(loaded, model=ending))
    assert caplog.text.count("steps are not recorded: the hidden states are not changed in place") == 1
    steps.run([2, 1])
    assert steps.beside.steps == 1


@pytest.mark.parametrize("processor", ["native", "x86-64-v3"])
def test_a_model_whose_kernels_are_not_those_of_its_attention_runs_as_it_is_written(
    folder: Path, processor: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        steps = Steps(tiny(folder, "llama", WeightMode.INT8), attending=native_backend(processor))
    assert caplog.text.count("steps are not recorded: the model's kernels are not those of its attention") == 1
    steps.run([2, 1])
    assert steps.beside.steps == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_take_the_memory_of_the_largest(folder: Path, family: str) -> None:
    def taken(most_tokens: int) -> int:
        steps = Steps(tiny(folder, family, WeightMode.INT8), most_tokens=most_tokens)
        return sum(each.nbytes for each in steps.recorded.memory)

    assert taken(32) == 32 * taken(1) > 0


def test_other_work_of_torch_is_refused_by_name(folder: Path) -> None:
    x, rows = torch.ones(2, 3), torch.tensor([0])
    for run, name in (
        (lambda: x * 2, "mul"),
        (lambda: torch.empty(2, dtype=torch.int64), "empty"),
        (lambda: x[rows], "__getitem__"),
        (lambda: x.clone(), "clone"),
    ):
        with pytest.raises(NotRecordable, match=f"{name} is not a call"):
            record(load_kernels(), run, tokens=2, memory=[])


def test_what_is_not_for_each_token_is_refused(folder: Path) -> None:
    library, x = load_kernels(), torch.zeros(3, 16)
    with pytest.raises(NotRecordable, match=r"memory of \[4, 2\] is not for 3 tokens"):
        record(library, lambda: torch.empty((4, 2)), tokens=3, memory=[])
    with pytest.raises(NotRecordable, match="empty is not a call"):
        record(library, lambda: torch.empty(3, 2), tokens=3, memory=[])

    def one_number() -> Tensor:
        library.add(x.data_ptr(), x.data_ptr(), 1)
        return x

    with pytest.raises(NotRecordable, match="add is not for as many rows"):
        record(library, one_number, tokens=3, memory=[])


def test_memory_is_given_out_again_once_nothing_looks_at_it(folder: Path) -> None:
    seen: list[int] = []

    def run() -> Tensor:
        first = torch.empty((2, 8))
        view = first.view(4, 4)[1:]
        seen.append(first.data_ptr())
        del first
        seen.append(torch.empty((2, 8)).data_ptr())
        del view
        seen.append(torch.empty((2, 7)).data_ptr())
        return torch.empty((2, 100))

    record(load_kernels(), run, tokens=2, memory=[])
    assert seen[0] != seen[1]
    assert seen[2] in seen[:2]


def test_recording_loads_no_further_modules(folder: Path) -> None:
    tiny(folder, "llama", WeightMode.INT8)
    made = subprocess.run(
        [sys.executable, "-c", RECORDING, str(folder / "llama")],
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert made.stdout.split() == ["played"]


def test_engines_that_share_a_library_record_nothing_of_each_other(folder: Path) -> None:
    loaded = tiny(folder, "llama", WeightMode.INT8)
    both = threading.Barrier(2)

    def work(_: int) -> None:
        for _ in range(5):
            both.wait(30)
            steps = Steps(loaded)
            for count in (1, 2, 3, 4, 1, 2, 3, 4):
                steps.run([1] * count)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(work, range(2), timeout=60)) == [None, None]
