"""The stages, in the order in which they run, and how long each may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """A module of this package with `run(ground)`, which gets a process of its own."""

    name: str
    about: str
    seconds: int  # after which it is ended


STAGES: Sequence[Stage] = (
    Stage("probe", "versions, and what the device can do at best", 40),
    Stage("build", "kernels, compiled or found", 150),
    Stage("correct", "every kernel and copy against float64", 90),
    Stage("speed", "attention and copies against the ceilings", 80),
    Stage("answers", "an engine against the CPU, and beside transformers", 120),
    Stage("serve", "all four services on one device", 110),
)
