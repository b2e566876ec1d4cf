"""Captured decode steps over emulated kernels, by a capture that records the function and calls it for a replay."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.emulated import emulated_backend
from tests.support.tiny import write_tiny
from twostroke.engine.attention.flashinfer import FlashInferAttention
from twostroke.engine.batch import Batch, Segment, build_batch
from twostroke.engine.blocks import SCRATCH_PAGE
from twostroke.engine.cache import KvCache
from twostroke.engine.cuda.graphs import DecodeGraphs, padded, sizes
from twostroke.engine.forward import EagerForward
from twostroke.engine.weights import LoadedModel, WeightMode, load_model

PAGES, PAGE_TOKENS, ROW_PAGES = 40, 4, 6


class Recorded:
    """A Capture on a CPU: what was recorded may only see new values through memory that it saw when it was recorded."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        out = run()

        def replay() -> Tensor:
            self.replays += 1
            return out.copy_(run())

        return replay


@cache
def tiny(folder: Path, family: str) -> LoadedModel:
    what = {"window": 7} if family == "gemma3" else {}
    model = write_tiny(folder / family, family=family, **what)
    return load_model(model, mode=WeightMode.F32, backend=emulated_backend())


class Steps:
    """The same steps over two caches: one step after the other, and captured."""

    def __init__(self, loaded: LoadedModel, *, most_rows: int) -> None:
        self.model, self.capture = loaded.model, Recorded()
        self.caches = [KvCache(loaded.kv_format(block_tokens=PAGE_TOKENS), PAGES) for _ in range(2)]
        over = [self.attention(cache) for cache in self.caches]
        self.eager = EagerForward(self.model, over[0])
        self.graphs = DecodeGraphs(
            self.model,
            over[1],
            EagerForward(self.model, over[1]),
            self.capture,
            most_rows=most_rows,
            row_pages=ROW_PAGES,
        )
        with torch.inference_mode():
            self.graphs.prepare()

    def attention(self, cache: KvCache) -> FlashInferAttention:
        found = self.model.backend.attention(cache, self.model.config.attention)
        assert isinstance(found, FlashInferAttention)
        return found

    @torch.inference_mode()
    def both(self, segments: Sequence[Segment]) -> None:
        """Run a step both ways and hold the results and the pages to each other."""
        batch = build_batch(segments, PAGE_TOKENS)
        torch.testing.assert_close(self.graphs(batch), self.eager(batch), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(self.caches[1].data[1:], self.caches[0].data[1:], atol=1e-5, rtol=1e-5)


def rows(count: int, *, position: int) -> list[Segment]:
    """Single tokens of sequences that own three pages each."""
    return [
        Segment((7 * each + position,), position, [1 + 3 * each + page for page in range(3)], sample=True)
        for each in range(count)
    ]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny(tmp_path_factory.mktemp("models"), request.param)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_a_replayed_emulated_step_equals_an_eager_one_at_every_number_of_rows(loaded: LoadedModel, count: int) -> None:
    steps = Steps(loaded, most_rows=8)
    prompts = [
        Segment([each, 3, 5], 0, [1 + 3 * each + page for page in range(3)], sample=False) for each in range(count)
    ]
    steps.both(prompts)
    for position in range(3, 12):
        steps.both(rows(count, position=position))
    assert steps.capture.replays == 9


def test_emulated_steps_of_all_kinds_mix(loaded: LoadedModel) -> None:
    steps = Steps(loaded, most_rows=4)
    steps.both([Segment(range(9), 0, (1, 2, 3), sample=True), Segment((5,), 0, (4,), sample=True)])
    for position in range(9, 12):
        steps.both([Segment((position,), position, (1, 2, 3), sample=True)])
        steps.both([Segment((position,), position, (1, 2, 3), sample=True), Segment((1, 2), 0, (9,), sample=True)])
    steps.both(rows(6, position=0))  # more than the largest captured size
    steps.both(rows(3, position=1))
    assert steps.capture.replays == 4


def test_steps_with_more_pages_than_their_tables_hold_run_one_kernel_after_the_other(loaded: LoadedModel) -> None:
    steps = Steps(loaded, most_rows=1)
    pages = range(1, ROW_PAGES + 2)
    steps.both([Segment(range(PAGE_TOKENS * ROW_PAGES), 0, pages, sample=True)])
    before = steps.capture.replays
    steps.both([Segment((1,), PAGE_TOKENS * ROW_PAGES, pages, sample=True)])
    assert steps.capture.replays == before


def test_a_schedule_of_another_shape_is_never_replayed(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(loaded, most_rows=2)
    steps.both(rows(2, position=0))
    shapes = iter(range(100))
    monkeypatch.setattr("twostroke.engine.attention.captured._shape", lambda _: (next(shapes),))
    before = steps.capture.replays
    with caplog.at_level(logging.WARNING):
        steps.both(rows(2, position=1))
        steps.both(rows(2, position=2))
    assert steps.capture.replays == before
    assert caplog.text.count("no graph for them") == 1
    assert len(steps.graphs._steps) == 1


def test_sizes_are_powers_of_two_and_the_most() -> None:
    assert sizes(1) == [1]
    assert sizes(8) == [1, 2, 4, 8]
    assert sizes(13) == [1, 2, 4, 8, 13]


@settings(deadline=None, max_examples=60)
@given(positions=st.lists(st.integers(0, 30), min_size=1, max_size=9), more=st.integers(0, 6))
def test_padding_leaves_the_batch_as_it_is_and_adds_tokens_of_the_scratch_page(positions: list[int], more: int) -> None:
    pages = iter(range(1, 1_000))
    segments = [
        Segment((position,), position, [next(pages) for _ in range(position // PAGE_TOKENS + 1)], sample=True)
        for position in positions
    ]
    batch = build_batch(segments, PAGE_TOKENS)
    wide = padded(batch, len(positions) + more)
    nobody = [Segment((0,), 0, (SCRATCH_PAGE,), sample=False)] * more
    assert_same(wide, build_batch([*segments, *nobody], PAGE_TOKENS))


def assert_same(found: Batch, expected: Batch) -> None:
    for name in Batch.__slots__:
        ours, theirs = getattr(found, name), getattr(expected, name)
        same = ours == theirs if isinstance(ours, int) else torch.equal(ours, theirs) and ours.dtype == theirs.dtype
        assert same, name
