"""What is measured in this process: the machine's ceilings, and an engine's steps beside the bounds that follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from bench import ceilings, steps
from bench.ceilings import Ceilings
from twostroke.engine.backends.choice import Device, choose_backend, usable_processors
from twostroke.engine.matrix import WeightMode
from twostroke.engine.weights import LoadedModel, load_model
from twostroke.launcher.models import find_model

PRODUCTS_OF_PARTS = 3  # of bfloat16, for one of float32 activations with float16 weights, each in two parts
CONTEXTS = (128, 1_024, 4_096, 8_000)
QUICK_CONTEXTS = (128, 1_024)
BATCHES = (1, 8, 32)


@dataclass(frozen=True, slots=True)
class Bound:
    """What a rate cannot pass on this machine, and why.

    Attributes:
        kind: the resource that runs out.
        rate: tokens a second.
    """

    kind: str
    rate: float

    def note(self, reached: float | None) -> str:
        """How near a measured rate of our f16 mode comes, in words."""
        share = "" if reached is None else f", f16 reaches {reached / self.rate:.2f}"
        return f"bound by {self.kind}: {self.rate:.0f}{share}"


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcess:
    """What was measured in this process.

    Attributes:
        threads: of a pass, as many as a worker has by default.
        ceilings: of the machine, with one thread and with `threads`.
        weights_gb: 1e9 bytes a second at which our f16 kernel reads matrices.
        loaded: the packaged model, f16.
        contexts: milliseconds of a step of one stream, by tokens before it.
        host: milliseconds of a step of the tiny model, by rows.
    """

    threads: int
    ceilings: Ceilings
    weights_gb: float
    loaded: LoadedModel
    contexts: dict[int, float]
    host: dict[int, float]

    def decode_bound(self, streams: int) -> Bound:
        """Of several streams together: each step reads all f16 matrices once, and multiplies them with every row."""
        config = self.loaded.config
        steps_a_second = 1e9 * max(*self.ceilings.read_gb, self.weights_gb) / ceilings.matrix_bytes(config, self.mode)
        kind, products = self._products
        bounds = (
            Bound("f16 bytes", streams * steps_a_second),
            Bound(kind, 1e9 * products / ceilings.decode_operations(config)),
        )
        return min(bounds, key=lambda bound: bound.rate)

    def prefill_bound(self, length: int) -> Bound:
        """Of a prompt, if all of it were one product of the fastest kind that keeps what the f16 mode promises."""
        kind, products = self._products
        return Bound(kind, length * 1e9 * products / ceilings.prefill_operations(self.loaded.config, length))

    def f32_prefill(self, length: int) -> float:
        """Tokens a second of a prompt, if all of it were one float32 product."""
        operations = ceilings.prefill_operations(self.loaded.config, length)
        return length * 1e9 * max(self.ceilings.gemm_f32) / operations

    @property
    def _products(self) -> tuple[str, float]:
        """The fastest kind of product, and its rate in 1e9 operations a second."""
        parts = ("bf16 products in parts", max(self.ceilings.gemm_bf16) / PRODUCTS_OF_PARTS)
        return max(("f32 product", max(self.ceilings.gemm_f32)), parts, key=lambda kind: kind[1])

    @property
    def mode(self) -> WeightMode:
        """The mode of the model that was loaded here."""
        return self.loaded.mode

    def kv_bytes(self, context: int) -> int:
        """Bytes of keys and values that a step reads behind so many tokens."""
        kv_format = self.loaded.kv_format()
        return kv_format.block_bytes * context // kv_format.block_tokens

    def step_growth(self) -> float:
        """How much a step grew from the shortest to the longest context, over how much the bytes it reads did."""
        short, long = min(self.contexts), max(self.contexts)
        matrices = ceilings.matrix_bytes(self.loaded.config, self.mode)
        bytes_growth = (matrices + self.kv_bytes(long)) / (matrices + self.kv_bytes(short))
        return self.contexts[long] / self.contexts[short] / bytes_growth

    def figures(self) -> Mapping[str, float]:
        """All of it, by name."""
        found = {f"step behind {context} tokens, ms": step for context, step in self.contexts.items()}
        found |= {f"host's part of a step of {rows}, ms": step for rows, step in self.host.items()}
        return found | {
            "threads": float(self.threads),
            "read, GB/s": max(self.ceilings.read_gb),
            "f16 matrices read by our kernel, GB/s": self.weights_gb,
            "f32 product, GFLOP/s": max(self.ceilings.gemm_f32),
            "bf16 product, GFLOP/s": max(self.ceilings.gemm_bf16),
            "int8 product, GOP/s": max(self.ceilings.gemm_int8),
        }


async def measure(*, quick: bool, profile: bool) -> InProcess:
    """Measure the machine, then an engine with the threads that a worker has by default."""
    print("ceilings of this machine", flush=True)
    threads = usable_processors()
    found = ceilings.measure(threads)
    torch.set_num_threads(1)
    backend = choose_backend(Device.CPU, threads=None)
    loaded = load_model(find_model(""), mode=WeightMode.F16, backend=backend)
    rate = ceilings.weights_gb(backend, loaded.config, loaded.mode)
    print("steps of an engine in this process", flush=True)
    contexts = await steps.by_context(loaded, QUICK_CONTEXTS if quick else CONTEXTS)
    host = await steps.host_ms(steps.tiny_model(), BATCHES)
    if profile:
        print("\n".join(await steps.profile(loaded, rows=max(BATCHES))))
    return InProcess(threads=threads, ceilings=found, weights_gb=rate, loaded=loaded, contexts=contexts, host=host)


def show_ceilings(here: InProcess) -> None:
    """What the machine does at best."""
    most = here.ceilings
    rows = {
        "read, GB/s": most.read_gb,
        "f32 product, GFLOP/s": most.gemm_f32,
        "bf16 product, GFLOP/s": most.gemm_bf16,
        "int8 product, GOP/s": most.gemm_int8,
    }
    print(f"\nceilings, with one thread and with {here.threads}:")
    for what, rates in rows.items():
        print(f"{what:30}" + "".join(f"{rate:10.1f}" for rate in rates))
    backend = here.loaded.model.backend.name
    print(f"our f16 kernel ({backend}) reads {here.weights_gb:.1f} GB/s with {here.threads} threads")


def show_steps(here: InProcess) -> None:
    """How a step grows with its context and its rows."""
    print(f"\none stream, engine in this process, f16, {here.threads} threads:")
    for context, step in here.contexts.items():
        megabytes = here.kv_bytes(context) / 1e6
        print(f"{context:6} tokens before it: {step:7.1f} ms a step, {megabytes:6.1f} MB of keys and values read")
    least, most = min(here.host), max(here.host)
    growth = 1e3 * (here.host[most] - here.host[least]) / (most - least)
    told = ", ".join(f"{rows} rows {step:.2f} ms" for rows, step in here.host.items())
    print(f"host's part of a step (two tiny layers): {told}; {growth:.0f} µs a row")
