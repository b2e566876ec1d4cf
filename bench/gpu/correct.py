"""Every kernel and copy against float64 on fresh random numbers, with NaN wherever nothing was written."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bench.gpu.findings import Finding
from bench.gpu.ground import Ground
from bench.gpu.model import write_model
from bench.gpu.parity import ERROR
from bench.gpu.scenes import expected, relative_error, scene, written
from bench.gpu.shapes import LARGE, SHAPES, Heads, attention_shape, kv_format
from twostroke.engine.backend import Activation, Backend
from twostroke.engine.backends.flashinfer import FlashInferBackend
from twostroke.engine.backends.torch import TorchBackend
from twostroke.engine.batch import Segment, build_batch
from twostroke.engine.cache import KvCache
from twostroke.engine.cuda.graphs import DecodeGraphs
from twostroke.engine.forward import EagerForward
from twostroke.engine.matrix import Matrix
from twostroke.engine.mode import KvMode, WeightMode
from twostroke.engine.weights import load_model
from twostroke.kv.transport.pages import Row

BOUND = 1e-2  # relative, of bfloat16 against float64; about three times what one rounding of the result makes


def run(ground: Ground) -> None:
    """Check attention for every shape, then what lies between, then pages."""
    torch.manual_seed(0)
    backend = ground.backend()
    for heads in SHAPES:
        with ground.notes.part(f"attention {heads.model}"):
            attention(ground, backend, heads)
    with ground.notes.part("windows"):
        windows(ground, backend)
    for name, check in (
        ("captured steps", captured),
        ("norms", norms),
        ("rotation", rotation),
        ("gates", gates),
        ("linears", linears),
    ):
        with ground.notes.part(name):
            check(ground, backend)
    with ground.notes.part("page moves"):
        page_moves(ground)


def attention(ground: Ground, backend: Backend, heads: Heads) -> None:
    """Decodes of all lengths, first chunks, chunks behind prefixes, and all of them in one step."""
    long = ground.size(8_191, 70)
    steps = {
        "decodes": [(0, 1), (15, 1), (16, 1), (long // 3, 1), (long, 1)],
        "first chunks": [(0, ground.size(700, 20)), (0, 16), (0, 2)],
        "chunks and decodes": [(long // 2, ground.size(300, 18)), (33, 17), (5, 1), (long, 1)],
    }
    for what, spans in steps.items():
        _attention(ground, backend, f"{heads.model} {what}", heads, spans, (None, None, None))


def windows(ground: Ground, backend: Backend) -> None:
    """Layers that see a few of the latest tokens, beside layers that see all."""
    spans = [(ground.size(900, 60), ground.size(200, 10)), (40, 1), (0, 5)]
    _attention(ground, backend, "windows of some layers", SHAPES[0], spans, (17, None, 100))


def _attention(
    ground: Ground,
    backend: Backend,
    name: str,
    heads: Heads,
    spans: list[tuple[int, int]],
    windows: tuple[int | None, ...],
) -> None:
    step = scene(heads, spans, ground.device, layers=len(windows))
    shape = attention_shape(heads, windows=windows)
    over = backend.attention(step.cache, shape)
    plan = over.plan(step.batch)
    errors, exact = [], True
    for layer in range(len(windows)):
        found = over.attend(layer, step.q, step.k, step.v, plan)
        ours = written(step, layer)
        exact &= torch.equal(ours[0], step.k) and torch.equal(ours[1], step.v)
        errors.append(relative_error(found, expected(step, shape, layer)))
    ground.notes.add(Finding(f"{name}, error", max(errors, key=lambda each: (each != each, each)), "", at_most=BOUND))
    ground.notes.add(Finding(f"{name}, keys and values bit for bit", float(exact), "", at_least=1.0))


def _against(ground: Ground, name: str, found: Tensor, right: Tensor) -> None:
    ground.notes.add(Finding(name, relative_error(found.cpu(), right.cpu()), "", at_most=BOUND))


def captured(ground: Ground, backend: FlashInferBackend) -> None:
    """Captured steps of single tokens against uncaptured ones, while their tables grow from step to step.

    The two share sequences out differently, and layers amplify that rounding, so the bound is that of a whole model.
    """
    model = load_model(write_model(ground), mode=WeightMode.BF16, backend=backend)
    form = model.kv_format(kv=KvMode.BF16)
    rows, length = 5, ground.size(700, 40)
    pages = -(-(length + 4) // form.block_tokens)
    caches = [KvCache(form, rows * pages + 1, ground.device) for _ in range(2)]
    over = [backend.attention(cache, model.config.attention) for cache in caches]
    eager = [EagerForward(model.model, each) for each in over]
    graphs = DecodeGraphs(model.model, over[1], eager[1], ground.capture(), most_rows=8, row_pages=pages)
    owned = [range(1 + each * pages, 1 + (each + 1) * pages) for each in range(rows)]
    draw = torch.Generator().manual_seed(3)
    with torch.inference_mode():
        graphs.prepare()
        for start, count in ((0, length), *((length + each, 1) for each in range(4))):
            tokens = torch.randint(300, 49_000, (rows, count), generator=draw).tolist()
            segments = [Segment(tokens[each], start, owned[each], sample=True) for each in range(rows)]
            batch = build_batch(segments, form.block_tokens)
            error = relative_error(graphs(batch), eager[0](batch))
            if count == 1:
                ground.notes.add(
                    Finding(f"captured step at {start}, against uncaptured", error, "", at_most=ERROR[WeightMode.BF16])
                )


def norms(ground: Ground, backend: Backend) -> None:
    """Of rows, of the heads of a view, and with weights that bfloat16 cannot hold."""
    judge = TorchBackend(packs=False)
    rows, fused = _half(ground, 33, 576), _half(ground, 33, 12, 64)
    for name, x in (("rows", rows), ("heads of a view", fused[:, 2:9])):
        for kind, weight in (
            ("", torch.rand(x.shape[-1]).bfloat16().float()),
            (" in float32", torch.rand(x.shape[-1])),
        ):
            right = judge.rms_norm(x.cpu().double(), weight.double(), 1e-5)
            _against(ground, f"norm of {name}{kind}", backend.rms_norm(x, backend.vector(weight), 1e-5), right)


def rotation(ground: Ground, backend: Backend) -> None:
    """In place of a view; what is beside it stays."""
    fused, turns = _half(ground, 65, 8, 64), torch.randn(65, 64)
    right, before = fused[:, :5].cpu().double(), fused[:, 5:].clone()
    TorchBackend(packs=False).rotate(right, turns.double())
    backend.rotate(fused[:, :5], turns.to(ground.device))
    _against(ground, "rotation of a view", fused[:, :5], right)
    ground.notes.add(Finding("what is beside it stays", float(torch.equal(fused[:, 5:], before)), "", at_least=1.0))


def gates(ground: Ground, backend: Backend) -> None:
    """Both activations."""
    gate_up = _half(ground, 65, 2 * 1_536)
    for activation in Activation:
        right = TorchBackend(packs=False).gated(gate_up.cpu().double(), activation)
        _against(ground, f"gate by {activation.name}", backend.gated(gate_up, activation), right)


def linears(ground: Ground, backend: Backend) -> None:
    """One row and many, with a bias that bfloat16 cannot hold, and added to what is there."""
    weight, bias = torch.randn(576, 1_536).bfloat16(), torch.rand(576)
    ours, right = backend.linear(Matrix(weight, bias=bias)), weight.double().t()
    for rows in (1, 7, 512):
        x, into = _half(ground, rows, 1_536), _half(ground, rows, 576)
        product = x.cpu().double() @ right + bias.double()
        _against(ground, f"linear of {rows} rows", ours(x), product)
        total = into.cpu().double() + product
        ours.add_to(into, x)
        _against(ground, f"linear added to {rows} rows", into, total)


def page_moves(ground: Ground) -> None:
    """Pages out to host memory and into other pages: the same bytes, and no other page changes."""
    cache = KvCache(kv_format(LARGE, layers=ground.size(8, 1)), ground.size(256, 12), ground.device)
    cache.data.copy_(torch.randn(cache.data.shape, device=ground.device).to(cache.data.dtype))
    count = cache.pages // 3
    shuffled = (torch.randperm(cache.pages - 1) + 1).tolist()
    sources, targets = shuffled[:count], shuffled[count : 2 * count]
    right = cache.data.clone()
    right[targets] = cache.data[sources]
    pages, rows = cache.movable(), [np.empty(0, dtype=np.uint8)] * count

    def take(index: int, row: Row) -> None:
        rows[index] = row.copy()

    def put(index: int, row: Row) -> bool:
        np.copyto(row, rows[index])
        return True

    pages.read(sources, take)
    whole = pages.write(targets, put)
    same = whole == count and torch.equal(cache.data.view(torch.int16), right.view(torch.int16))
    ground.notes.add(Finding(f"{count} pages out and in, bit for bit", float(same), "", at_least=1.0))


def _half(ground: Ground, *shape: int) -> Tensor:
    return torch.randn(shape, device=ground.device).bfloat16()
