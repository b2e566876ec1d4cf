"""How near attention and copies come to what the device can do: its rate of copies, and of matrix products."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from bench.gpu.findings import Finding
from bench.gpu.ground import Ground
from bench.gpu.probe import copy_rate, product_rate
from bench.gpu.scenes import Scene, scene
from bench.gpu.shapes import LARGE, attention_shape, kv_format
from twostroke.engine.attention import AttentionBackend, Plan
from twostroke.engine.backend import Backend
from twostroke.engine.cache import KvCache
from twostroke.kv.transport.pages import Row

# Stated before any run. A read-only kernel may pass a copy's rate, so 0.7 of it is modest.
DECODE_AIM, PREFILL_AIM, GATHER_AIM, PLAN_MS = 0.7, 0.4, 0.3, 0.3
_PCIE_BYTES = 50e9  # a second, about what one x16 slot of the fifth generation gives


def run(ground: Ground) -> None:
    """Measure the ceilings again, then what is below them."""
    torch.manual_seed(0)
    backend = ground.backend()
    rates = copy_rate(ground), product_rate(ground)
    for batch in (1, 8, 64, 256):
        for length in (1_024, 4_096):
            with ground.notes.part(f"decode {batch} x {length}"):
                decode(ground, backend, batch, length, rates[0], layers=1)
    with ground.notes.part("decode in block-major pages"):
        decode(ground, backend, 64, 4_096, rates[0], layers=8)
    with ground.notes.part("prefill"):
        prefill(ground, backend, rates[1])
    for batch in (64, 256):
        with ground.notes.part(f"plan {batch}"):
            plan(ground, backend, batch)
    with ground.notes.part("page moves"):
        page_moves(ground)


def decode(ground: Ground, backend: Backend, batch: int, length: int, rate: float, *, layers: int) -> None:
    """One layer's attention of single tokens: keys and values are read once, at best at the copy rate."""
    batch, length = ground.size(batch, 2), ground.size(length, 40)
    step = scene(LARGE, [(length - 1, 1)] * batch, ground.device, layers=layers)
    seconds = _attended(ground, backend, step, layers)
    read = batch * length * 2 * LARGE.kv_heads * LARGE.head_dim * step.cache.data.itemsize
    name = f"decode attention, {batch} x {length}, {layers} layer{'s' if layers > 1 else ''} a page"
    aim = DECODE_AIM if batch >= 64 and length >= 4_096 else None
    ground.notes.add(Finding(f"{name}, of copy rate", read / seconds / rate, "", at_least=aim))
    ground.notes.add(Finding(name, 1e6 * seconds, "µs"))


def prefill(ground: Ground, backend: Backend, rate: float) -> None:
    """One layer's causal attention of whole prompts, against the rate of a matrix product."""
    sequences, length = ground.size(8, 2), ground.size(4_096, 32)
    step = scene(LARGE, [(0, length)] * sequences, ground.device)
    seconds = _attended(ground, backend, step, 1)
    operations = 4 * LARGE.heads * LARGE.head_dim * sequences * length * length / 2
    aim = None if ground.emulated else PREFILL_AIM
    ground.notes.add(Finding("prefill attention, of product rate", operations / seconds / rate, "", at_least=aim))


def plan(ground: Ground, backend: Backend, batch: int) -> None:
    """What the host does once a step, for decodes."""
    batch = ground.size(batch, 2)
    step = scene(LARGE, [(ground.size(1_023, 20), 1)] * batch, ground.device)
    over = backend.attention(step.cache, attention_shape(LARGE, windows=(None,)))
    seconds = ground.seconds(lambda: over.plan(step.batch))
    aim = PLAN_MS if batch == 64 else None
    ground.notes.add(Finding(f"plan of {batch} decodes", 1e3 * seconds, "ms", at_most=aim))


def page_moves(ground: Ground) -> None:
    """Pages to host memory and back: the bus is the ceiling, and the host's own copy out of the stage comes on top."""
    cache = KvCache(kv_format(LARGE, layers=ground.size(32, 1)), ground.size(1_025, 9), ground.device)
    pages, numbers = cache.movable(), list(range(1, cache.pages))
    rows = np.zeros((len(numbers), pages.block_bytes), dtype=np.uint8)
    moved = len(numbers) * pages.block_bytes

    def take(index: int, row: Row) -> None:
        np.copyto(rows[index], row)

    def put(index: int, row: Row) -> bool:
        np.copyto(row, rows[index])
        return True

    out = ground.seconds(lambda: pages.read(numbers, take), rounds=5)
    into = ground.seconds(lambda: pages.write(numbers, put), rounds=5)
    for name, seconds in (("pages out", out), ("pages in", into)):
        aim = None if ground.emulated else GATHER_AIM
        ground.notes.add(Finding(f"{name}, of the bus", moved / seconds / _PCIE_BYTES, "", at_least=aim))


def _attended(ground: Ground, backend: Backend, step: Scene, layers: int) -> float:
    over = backend.attention(step.cache, attention_shape(LARGE, windows=(None,) * layers))
    planned = over.plan(step.batch)
    return ground.device_seconds(_call(over, step, planned, layers)) / layers


def _call(over: AttentionBackend, step: Scene, planned: Plan, layers: int) -> Callable[[], None]:
    def run() -> None:
        for layer in range(layers):
            over.attend(layer, step.q, step.k, step.v, planned)

    return run
