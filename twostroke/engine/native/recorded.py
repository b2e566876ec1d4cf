"""Steps on a CPU: recorded for each order of size before the first, and played."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import replace
from functools import partial

from torch import Tensor

from twostroke.engine.attention.native import NativeAttention
from twostroke.engine.backends.native import NativeBackend
from twostroke.engine.batch import Batch, Segment, build_batch
from twostroke.engine.blocks import SCRATCH_PAGE
from twostroke.engine.forward import Forward
from twostroke.engine.models import Begun, CausalModel
from twostroke.engine.native.library import CAttention, NotRecordable
from twostroke.engine.native.tape import Tape, record

MOST_TOKENS = 1_024  # of a recorded step: beyond it, calling kernels is a small part of a step
MOST_BESIDE_BLAS = 32  # without tiles, more tokens may go to BLAS

_log = logging.getLogger(__name__)


class RecordedForward:
    """A Forward that plays steps, and leaves those that are not recorded to another.

    Steps are the same calls, whatever sequences their tokens belong to: the plan's struct and what goes into the layers
    are copied to where the recorded ones lay. So results are those of the eager pass, bit for bit.

    Args:
        model: whose steps.
        attention: over the model's pages.
        eager: runs what is not recorded.
        most_tokens: of a step.

    Attributes:
        memory: what recorded steps compute in, each in what the largest one needs.
    """

    def __init__(self, model: CausalModel, attention: NativeAttention, eager: Forward, *, most_tokens: int) -> None:
        self._model, self._attention, self._eager = model, attention, eager
        self._most = min(_next_power(most_tokens), MOST_TOKENS if attention.library.has_tiles else MOST_BESIDE_BLAS)
        self._begun: Begun = ()  # where what goes into the layers must lie; what comes out is the first of it
        self._described = CAttention()  # where the plan must lie
        self._tapes: dict[int, Tape] = {}  # by the most tokens that they are for
        self.memory: list[Tensor] = []

    def prepare(self) -> None:
        """Record steps of every power of two, unless the model does what cannot be recorded."""
        self._eager.prepare()
        try:
            self._record()
        except NotRecordable as reason:
            _log.info("steps are not recorded: %s", reason)

    def __call__(self, batch: Batch) -> Tensor:
        """Play what was recorded for as many tokens, or a few more."""
        tokens = len(batch.token_ids)
        tape = self._tapes.get(_next_power(tokens))
        if tape is None:
            return self._eager(batch)
        begun, plan = self._model.begin(batch.token_ids, batch.positions), self._attention.plan(batch)
        for each, place in zip(begun, self._begun, strict=True):
            place[:tokens].copy_(each)
        ctypes.memmove(ctypes.byref(self._described), ctypes.byref(plan.described), ctypes.sizeof(CAttention))
        tape.play(tokens)
        return self._begun[0][:tokens]

    def _record(self) -> None:
        """Record the largest step, and the others in the same memory; raises NotRecordable."""
        model, attention = self._model, self._attention
        if not isinstance(model.backend, NativeBackend) or model.backend.library is not attention.library:
            raise NotRecordable("the model's kernels are not those of its attention")
        nobody = build_batch([Segment((0,), 0, (SCRATCH_PAGE,), sample=False)] * self._most, attention.page_tokens)
        begun = model.begin(nobody.token_ids, nobody.positions)
        plan = replace(attention.plan(nobody), described=self._described)

        def run(tokens: int) -> Tensor:
            rows = tuple(each[:tokens] for each in begun)
            hidden = model.layers(rows, attention, plan)
            if (hidden.data_ptr(), hidden.shape) != (rows[0].data_ptr(), rows[0].shape):
                raise NotRecordable("the hidden states are not changed in place")
            return hidden

        memory: list[Tensor] = []
        sizes = [1 << exponent for exponent in reversed(range(self._most.bit_length()))]
        tapes = {size: record(attention.library, partial(run, size), tokens=size, memory=memory) for size in sizes}
        self._begun, self._tapes, self.memory = begun, tapes, memory


def _next_power(tokens: int) -> int:
    """Return the least power of two that is no less."""
    return 1 << (tokens - 1).bit_length()
