"""Steps on a CPU: recorded for each order of size before the first, and played."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass, replace

from torch import Tensor

from twostroke.engine.attention.native import NativeAttention, NativePlan
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
    """

    def __init__(self, model: CausalModel, attention: NativeAttention, eager: Forward, *, most_tokens: int) -> None:
        self._model, self._attention, self._eager = model, attention, eager
        limit = MOST_TOKENS if attention.library.has_tiles else MOST_BESIDE_BLAS
        self._rooms = [1 << exponent for exponent in range(min(_room(most_tokens), limit).bit_length())]
        self._steps: dict[int, _Step] = {}  # by the tokens that they have room for

    def prepare(self) -> None:
        """Record steps of every power of two, unless the model does what cannot be recorded."""
        self._eager.prepare()
        try:
            for room in self._rooms:
                self._steps[room] = _Step.recorded(self._model, self._attention, room)
        except NotRecordable as reason:
            _log.info("steps are not recorded: %s", reason)

    def __call__(self, batch: Batch) -> Tensor:
        """Play what was recorded for as many tokens, or a few more."""
        step = self._steps.get(_room(len(batch.token_ids)))
        if step is None:
            return self._eager(batch)
        return step.play(self._model.begin(batch.token_ids, batch.positions), self._attention.plan(batch))


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of up to so many tokens.

    Attributes:
        begun: where what goes into the layers must lie; what comes out is the first of it.
        described: where the plan must lie.
    """

    begun: Begun
    described: CAttention
    tape: Tape

    @classmethod
    def recorded(cls, model: CausalModel, attention: NativeAttention, room: int) -> _Step:
        """Record a step of `room` tokens; raises NotRecordable."""
        nobody = build_batch([Segment((0,), 0, (SCRATCH_PAGE,), sample=False)] * room, attention.page_tokens)
        begun, described = model.begin(nobody.token_ids, nobody.positions), CAttention()
        plan = replace(attention.plan(nobody), described=described)
        tape = record(attention.library, lambda: model.layers(begun, attention, plan), tokens=room)
        return cls(begun, described, tape)

    def play(self, begun: Begun, plan: NativePlan) -> Tensor:
        """Do for a step what was recorded; returns [T, hidden], which the next one overwrites."""
        tokens = len(begun[0])
        for each, place in zip(begun, self.begun, strict=True):
            place[:tokens].copy_(each)
        ctypes.memmove(ctypes.byref(self.described), ctypes.byref(plan.described), ctypes.sizeof(CAttention))
        self.tape.play(tokens)
        return self.begun[0][:tokens]


def _room(tokens: int) -> int:
    """Return the next power of two."""
    return 1 << (tokens - 1).bit_length()
