"""Decode steps as CUDA graphs: captured once for a few batch sizes, replayed with one launch instead of hundreds.

A step of single tokens is padded to the next captured size. Padded rows are sequences of one token on the scratch page:
they read and write that page alone, and what comes out for them is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from twostroke.engine.attention.flashinfer import MOST_SLOTS, FlashInferAttention
from twostroke.engine.batch import Batch, Segment, build_batch
from twostroke.engine.blocks import SCRATCH_PAGE
from twostroke.engine.cuda.fence import send
from twostroke.engine.forward import Forward
from twostroke.engine.models import CausalModel, forward

_log = logging.getLogger(__name__)
_WARM_RUNS = 2  # before a capture: libraries allocate and choose kernels the first times

Replay = Callable[[], Tensor]


class Capture(Protocol):
    """Makes device work repeatable."""

    def __call__(self, run: Callable[[], Tensor]) -> Replay:
        """Return what repeats the work of `run` on the same memory, and returns the same tensor each time."""


class CudaCapture:
    """Captures CUDA graphs that share one pool of memory: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Replay:
        """Run a few times beside the default stream, then capture."""
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self._device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARM_RUNS):
                run()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


class DecodeGraphs:
    """A Forward that replays steps of single tokens, and leaves all others to another.

    Args:
        model: whose steps.
        attention: over the model's pages.
        eager: runs what is not captured.
        capture: makes steps repeatable.
        most_rows: single tokens of the largest captured step.
        row_pages: most pages of a sequence.
    """

    def __init__(
        self,
        model: CausalModel,
        attention: FlashInferAttention,
        eager: Forward,
        capture: Capture,
        *,
        most_rows: int,
        row_pages: int,
    ) -> None:
        self._model, self._attention = model, attention
        self._eager, self._capture = eager, capture
        self._most_rows, self._row_pages = min(most_rows, MOST_SLOTS), row_pages
        self._steps: list[_Step] = []  # the smallest first

    def prepare(self) -> None:
        """Capture every size, the largest first, so that the others fit into its memory."""
        for rows in reversed(sizes(self._most_rows)):
            step = _Step(self._model, self._attention, self._capture, rows=rows, pages=rows * self._row_pages)
            self._steps.insert(0, step)
        _log.info("captured decode steps of up to %d tokens", self._most_rows)

    def __call__(self, batch: Batch) -> Tensor:
        """Replay the smallest captured step that has room."""
        rows = len(batch.token_ids)
        step = next((each for each in self._steps if each.rows >= rows), None)
        if step is None or rows != len(batch.kv_last_page_len) or not step.fits(batch):
            return self._eager(batch)
        hidden = step.run(padded(batch, step.rows))
        if hidden is None:
            _log.warning("steps of %d tokens are scheduled in another way than captured: no graph for them", step.rows)
            self._steps.remove(step)
            return self._eager(batch)
        return hidden[:rows]


class _Step:
    """One captured size."""

    def __init__(
        self, model: CausalModel, attention: FlashInferAttention, capture: Capture, *, rows: int, pages: int
    ) -> None:
        self.rows = rows
        nobody = padded(build_batch([Segment((0,), 0, (SCRATCH_PAGE,), sample=False)], attention.page_tokens), rows)
        device = model.backend.device
        self._token_ids, self._positions = nobody.token_ids.to(device), nobody.positions.to(device)
        self._slots, plan = attention.slots(nobody, pages=pages)
        self._replay = capture(lambda: forward(model, self._token_ids, self._positions, attention, plan))

    def fits(self, batch: Batch) -> bool:
        """Whether the page table has room, padding included."""
        return self._slots.fits(batch, self.rows)

    def run(self, batch: Batch) -> Tensor | None:
        """Replay a padded batch; None when it must not be replayed."""
        send(batch.token_ids, self._token_ids)
        send(batch.positions, self._positions)
        return self._replay() if self._slots.load(batch) else None


def sizes(most: int) -> list[int]:
    """Return the powers of two below `most`, and `most`: padding at most doubles a step."""
    powers = [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent < most]
    return [*powers, most]


def padded(batch: Batch, rows: int) -> Batch:
    """Add single tokens to single tokens, up to `rows` in all; none of them samples."""
    missing = rows - len(batch.token_ids)
    nothing, one_each = torch.zeros(missing, dtype=torch.int64), torch.arange(1, missing + 1, dtype=torch.int32)
    scratch = torch.full((missing,), SCRATCH_PAGE, dtype=torch.int32)
    return replace(
        batch,
        token_ids=torch.cat((batch.token_ids, nothing)),
        positions=torch.cat((batch.positions, nothing)),
        qo_indptr=torch.arange(rows + 1, dtype=torch.int32),
        kv_indptr=torch.cat((batch.kv_indptr, batch.kv_indptr[-1:] + one_each)),
        kv_indices=torch.cat((batch.kv_indices, scratch)),
        kv_last_page_len=torch.cat((batch.kv_last_page_len, torch.ones_like(scratch))),
        slot_page=torch.cat((batch.slot_page, scratch.long())),
        slot_offset=torch.cat((batch.slot_offset, nothing)),
    )
