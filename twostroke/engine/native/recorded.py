"""Small steps on a CPU: recorded at the first of each size, and played from then on."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass, replace

from torch import Tensor

from twostroke.engine.attention.native import NativeAttention, NativePlan
from twostroke.engine.batch import Batch
from twostroke.engine.forward import Forward
from twostroke.engine.models import Begun, CausalModel
from twostroke.engine.native.library import CAttention
from twostroke.engine.native.tape import NotRecordable, RecordableAttention, Tape, record

MOST_ROWS = 64  # tokens of a recorded step: beyond it, calling kernels is a small part of a step

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of one size."""

    begun: Begun  # where what goes into the layers must lie, and what comes out of them will
    described: CAttention  # where the plan must lie
    tape: Tape
    hidden: Tensor

    @classmethod
    def recorded(cls, model: CausalModel, attention: RecordableAttention, begun: Begun, plan: NativePlan) -> _Step:
        """Run a step and record it; raises NotRecordable."""
        described = CAttention.from_buffer_copy(plan.described)
        fixed = replace(plan, described=described, address=ctypes.addressof(described))
        tape, hidden = record(attention, lambda: model.layers(begun, attention, fixed), keeps=(begun, described))
        return cls(begun, described, tape, hidden)

    def play(self, begun: Begun, plan: NativePlan) -> Tensor:
        """Do for another step what was recorded; returns [T, hidden], which the next one overwrites."""
        for mine, given in zip(self.begun, begun, strict=True):
            mine.copy_(given)
        ctypes.memmove(ctypes.addressof(self.described), plan.address, ctypes.sizeof(CAttention))
        self.tape.play()
        return self.hidden


class RecordedForward:
    """A Forward that plays steps of few tokens, and leaves all others to another.

    Steps of as many tokens are the same calls, whatever sequences they belong to: the plan's struct and what goes into
    the layers are copied to where the recorded ones lay. So results are those of the eager pass, bit for bit.
    """

    def __init__(self, model: CausalModel, attention: NativeAttention, eager: Forward) -> None:
        self._model, self._eager = model, eager
        self._attention = RecordableAttention(attention)
        self._steps: dict[int, _Step] = {}  # by rows
        self._odd: set[int] = set()  # rows of steps in which the model does what cannot be recorded

    def prepare(self) -> None:
        """Leave recording to the first step of a size: it takes no longer than another."""
        self._eager.prepare()

    def __call__(self, batch: Batch) -> Tensor:
        """Play what was recorded for so many tokens, or record it."""
        rows = len(batch.token_ids)
        if rows > MOST_ROWS or rows in self._odd:
            return self._eager(batch)
        begun, plan = self._model.begin(batch.token_ids, batch.positions), self._attention.plan(batch)
        if rows in self._steps:
            return self._steps[rows].play(begun, plan)
        try:
            self._steps[rows] = _Step.recorded(self._model, self._attention, begun, plan)
        except NotRecordable as reason:
            _log.info("steps of %d tokens are not recorded: %s", rows, reason)
            self._odd.add(rows)
            return self._eager(batch)
        return self._steps[rows].hidden
