"""FlashInfer's attention for steps that are captured once and replayed: tables at fixed places, filled each time.

The kernels' schedule lies in device memory too, and a replay with that of another step would be wrong, or never end.
So it is made anew each time, and its shape, which the captured launches depend on, must come out as it was.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from twostroke.engine.attention.wrappers import PageTable, Wrapper, Wrappers
from twostroke.engine.batch import Batch
from twostroke.engine.cuda.fence import fence_on, send


class DecodeSlots:
    """The tables of always the same number of single tokens.

    Args:
        wrappers: makes and plans FlashInfer's.
        windows: the model's distinct ones.
        first: a batch of that number of single tokens; it is planned, and decides the schedule's shape.
        pages: most entries of a batch's kv_indices.
    """

    def __init__(self, wrappers: Wrappers, windows: tuple[int | None, ...], first: Batch, *, pages: int) -> None:
        rows, device = len(first.token_ids), wrappers.device

        def table(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.table = PageTable(
            batch_indices=torch.arange(rows, dtype=torch.int32, device=device),
            positions=table(rows),
            kv_indptr=table(rows + 1),
            kv_indices=table(pages),
            kv_last_page_len=table(rows),
        )
        self._wrappers = wrappers
        self._fence = fence_on(device)
        self.planned: Mapping[int | None, Wrapper] = {each: wrappers.captured_decode(self.table) for each in windows}
        for window, wrapper in self.planned.items():
            wrappers.plan_decode(wrapper, first, first.kv_indices, window)
        self._shapes = {window: _shape(wrapper) for window, wrapper in self.planned.items()}

    def fits(self, batch: Batch, rows: int) -> bool:
        """Whether the tables have room for the pages of a batch that is padded to `rows`, with a page a row."""
        return len(batch.kv_indices) + rows - len(batch.token_ids) <= len(self.table.kv_indices)

    def load(self, batch: Batch) -> bool:
        """Fill the tables and plan; False when the schedule has another shape, and must not be replayed.

        The device may still be reading what the last call left in pinned memory; it is waited for.
        """
        self._fence.synchronize()
        send(batch.positions.to(torch.int32), self.table.positions)
        send(batch.kv_indptr, self.table.kv_indptr)
        send(batch.kv_indices, self.table.kv_indices)
        send(batch.kv_last_page_len, self.table.kv_last_page_len)
        for window, wrapper in self.planned.items():
            self._wrappers.replan_decode(wrapper, batch, self.table, window)
        self._fence.record()
        return all(_shape(wrapper) == self._shapes[window] for window, wrapper in self.planned.items())


def _shape(wrapper: Wrapper) -> tuple[int, ...]:
    """Return what the launches of a planned wrapper depend on: counts, offsets and flags."""
    return tuple(map(int, wrapper._plan_info))
