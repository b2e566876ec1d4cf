"""What stages stand on: a device or its emulation, sizes that suit it, a clock that waits for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.gpu.findings import Notes
from twostroke.engine.backends.flashinfer import FlashInferBackend, open_flashinfer
from twostroke.engine.cuda.graphs import Capture, CudaCapture, Replay
from twostroke.engine.mode import WeightMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """Where a stage runs.

    Attributes:
        emulated: whether a CPU plays the GPU: sizes are small, and no figure means anything.
        folder: for the model, logs and results; shared by all stages.
        notes: this stage's.
    """

    emulated: bool
    folder: Path
    notes: Notes

    @property
    def device(self) -> torch.device:
        """Where tensors are."""
        return torch.device("cpu") if self.emulated else torch.device("cuda", 0)

    @property
    def model(self) -> Path:
        """The folder of the model that is served."""
        return self.folder / "model"

    def backend(self, mode: WeightMode = WeightMode.BF16) -> FlashInferBackend:
        """Open the GPU's backend, or emulate it."""
        if not self.emulated:
            return open_flashinfer(mode)
        from tests.support.emulated import emulated_backend

        return emulated_backend(torch.bfloat16 if mode is WeightMode.BF16 else torch.float16)

    def capture(self) -> Capture:
        """Return what captures a step here."""
        return _called if self.emulated else CudaCapture(self.device)

    def size(self, real: int, small: int) -> int:
        """Choose a size: for the device, or for a rehearsal."""
        return small if self.emulated else real

    def synchronize(self) -> None:
        """Return once the device is idle."""
        if not self.emulated:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object], *, rounds: int = 20) -> float:
        """Time a piece of work: the median of rounds that each wait for the device."""
        for _ in range(2 if self.emulated else 5):
            run()
        times = []
        for _ in range(2 if self.emulated else rounds):
            self.synchronize()
            began = time.perf_counter()
            run()
            self.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def device_seconds(self, run: Callable[[], object], *, repeats: int = 20) -> float:
        """Time a piece of work without what it costs to launch it: several in a row, captured where that can be."""
        if self.emulated:
            return self.seconds(run)

        def several() -> torch.Tensor:
            for _ in range(repeats):
                run()
            return torch.empty(0)

        return self.seconds(self.capture()(several), rounds=7) / repeats


def _called(run: Callable[[], torch.Tensor]) -> Replay:
    return run
