"""Which way of running steps is the fastest for a model where it is."""

from __future__ import annotations

from twostroke.engine.attention import AttentionBackend
from twostroke.engine.attention.flashinfer import FlashInferAttention
from twostroke.engine.attention.native import NativeAttention
from twostroke.engine.cuda.graphs import CudaCapture, DecodeGraphs
from twostroke.engine.forward import EagerForward, Forward
from twostroke.engine.models import CausalModel
from twostroke.engine.native.recorded import RecordedForward


def forward_on(
    model: CausalModel, attention: AttentionBackend, *, graphs: bool, most_rows: int, row_pages: int, most_tokens: int
) -> Forward:
    """Return what runs a model's steps: recorded on a CPU, captured on a GPU if `graphs` says so, or eager."""
    eager = EagerForward(model, attention)
    if isinstance(attention, NativeAttention):
        return RecordedForward(model, attention, eager, most_tokens=most_tokens)
    if graphs and model.backend.device.type == "cuda" and isinstance(attention, FlashInferAttention):
        capture = CudaCapture(model.backend.device)
        return DecodeGraphs(model, attention, eager, capture, most_rows=most_rows, row_pages=row_pages)
    return eager
