"""Steps on a CPU: recorded at the first of each order of size, and played from then on."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass, replace

from torch import Tensor

from twostroke.engine.attention.native import NativeAttention, NativePlan
from twostroke.engine.batch import Batch
from twostroke.engine.forward import Forward
from twostroke.engine.models import Begun, CausalModel
from twostroke.engine.native.library import CAttention, NotRecordable
from twostroke.engine.native.tape import Tape, record

MOST_TOKENS = 1_024  # of a recorded step: beyond it, calling kernels is a small part of a step
MOST_BESIDE_BLAS = 32  # without tiles, more tokens may go to BLAS

_log = logging.getLogger(__name__)


class RecordedForward:
    """A Forward that plays steps, and leaves those that cannot be recorded to another.

    Steps are the same calls, whatever sequences their tokens belong to: the plan's struct and what goes into the layers
    are copied to where the recorded ones lay. So results are those of the eager pass, bit for bit.
    """

    def __init__(self, model: CausalModel, attention: NativeAttention, eager: Forward) -> None:
        self._model, self._attention, self._eager = model, attention, eager
        self._most = MOST_TOKENS if attention.library.has_tiles else MOST_BESIDE_BLAS
        self._steps: dict[int, _Step] = {}  # by the tokens that they have room for, powers of two

    @property
    def rooms(self) -> tuple[int, ...]:
        """How many tokens the steps recorded so far have room for."""
        return tuple(sorted(self._steps))

    def prepare(self) -> None:
        """Leave recording to the first step of a size: it takes no longer than another."""
        self._eager.prepare()

    def __call__(self, batch: Batch) -> Tensor:
        """Play what was recorded for such steps, or record it."""
        tokens = len(batch.token_ids)
        room = 1 << (tokens - 1).bit_length()
        if room > self._most:
            return self._eager(batch)
        begun, plan = self._model.begin(batch.token_ids, batch.positions), self._attention.plan(batch)
        if room in self._steps:
            return self._steps[room].play(begun, plan)
        try:
            self._steps[room] = _Step.recorded(self._model, self._attention, begun, plan, room=room)
        except NotRecordable as reason:
            _log.info("steps are not recorded: %s", reason)
            self._most = 0
            return self._eager(batch)
        return self._steps[room].hidden(tokens)


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
    def recorded(
        cls, model: CausalModel, attention: NativeAttention, begun: Begun, plan: NativePlan, *, room: int
    ) -> _Step:
        """Run a step and record it; raises NotRecordable."""
        tokens, described = len(begun[0]), CAttention()
        kept = tuple(each.new_empty((room, *each.shape[1:])) for each in begun)
        _place(begun, plan, kept, described)
        first = tuple(each[:tokens] for each in kept)
        fixed = replace(plan, described=described)
        tape = record(attention.library, lambda: model.layers(first, attention, fixed), tokens=tokens, room=room)
        return cls(kept, described, tape)

    def play(self, begun: Begun, plan: NativePlan) -> Tensor:
        """Do for another step what was recorded; returns [T, hidden], which the next one overwrites."""
        _place(begun, plan, self.begun, self.described)
        self.tape.play(len(begun[0]))
        return self.hidden(len(begun[0]))

    def hidden(self, tokens: int) -> Tensor:
        """Return [tokens, hidden] of what came out last."""
        return self.begun[0][:tokens]


def _place(begun: Begun, plan: NativePlan, kept: Begun, described: CAttention) -> None:
    """Copy what differs between steps to where their calls look for it."""
    for each, place in zip(begun, kept, strict=True):
        place[: len(each)].copy_(each)
    ctypes.memmove(ctypes.byref(described), ctypes.byref(plan.described), ctypes.sizeof(CAttention))
