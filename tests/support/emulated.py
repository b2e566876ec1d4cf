"""FlashInfer's own Python code over emulated kernels, on a CPU: it proves our calls and tables, never the kernels.

The package is imported a second time, apart from the one that other tests may use, and its compiled modules are
replaced: what its code hands to them is computed here in float64, from those very tensors.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from twostroke.engine.backends.flashinfer import FlashInferBackend
from twostroke.engine.cuda.package import load_flashinfer

NON_CAUSAL, CAUSAL = 0, 1
CPU = torch.device("cpu")


def emulated_backend(dtype: torch.dtype = torch.float32) -> FlashInferBackend:
    """The GPU's backend, on the CPU; skips the test where the package is not installed."""
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("flashinfer-python is not installed: `make test` installs it")
    return FlashInferBackend(emulated_package(), CPU, dtype)


@cache
def emulated_package() -> ModuleType:
    """A copy of FlashInfer whose kernels are emulated."""
    package = _private_copy()
    for name in ("decode", "prefill"):
        module = getattr(package, name)
        module.torch = _TorchWithoutDevice()
        module.get_batch_prefill_module = lambda *_: SimpleNamespace(plan=_plan, paged_run=_paged_run)
    package.page.get_page_module = lambda: SimpleNamespace(append_paged_kv_cache=_append)
    package.rope.get_rope_module = lambda: SimpleNamespace(apply_rope_pos_ids_cos_sin_cache=_rope)
    package.norm.get_norm_module = lambda: SimpleNamespace(rmsnorm=_rms_norm)
    package.activation.get_act_and_mul_module = lambda name: SimpleNamespace(**{f"{name}_and_mul": _ACTIVATIONS[name]})
    return package


def _private_copy() -> ModuleType:
    load_flashinfer()
    others = _taken_from_modules()
    try:
        return importlib.import_module("flashinfer")
    finally:
        _taken_from_modules()
        sys.modules.update(others)


def _taken_from_modules() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]
    return {name: sys.modules.pop(name) for name in names}


class _TorchWithoutDevice(ModuleType):
    """torch, where memory is never pinned and no device has to be chosen."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = SimpleNamespace(device=contextlib.nullcontext)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: Any, pin_memory: bool = False, **told: Any) -> Tensor:
        return torch.empty(*size, **told)


def _plan(*told: Any) -> list[int]:
    """Leave a mark of the planned tables in the workspace, and answer what a schedule would look like."""
    _, workspace, _, qo_indptr, kv_indptr, kv_lens, rows, batch, heads, kv_heads, page, captured, *rest = told
    width, width_out, causal, window, split, no_split, colocated = rest
    for table in (qo_indptr, kv_indptr, kv_lens):
        _require_table(table)
    assert len(qo_indptr) == len(kv_indptr) == batch + 1
    assert int(qo_indptr[-1]) == rows or captured
    assert heads % kv_heads == 0
    assert (split, no_split, colocated) == (-1, False, 0)
    _marks(workspace).copy_(_mark(qo_indptr, kv_lens, window))
    return [rows, batch, page, width, width_out, int(captured), int(causal)]


def _paged_run(*told: Any) -> None:
    _, workspace, planned, q, keys, values, qo_indptr, kv_indptr, indices, last, out, lse, *rest = told
    mask_mode, layout, window, pdl, _, _, _, _, _, _, soft_cap, scale, *_ = rest
    assert (lse, layout, pdl, soft_cap) == (None, 0, False, 0.0)
    assert keys.stride() == values.stride()
    assert keys.dtype == values.dtype
    assert out.is_contiguous()
    for table in (qo_indptr, kv_indptr, indices, last):
        _require_table(table)
    lengths = (kv_indptr.diff() - 1) * planned[2] + last
    assert torch.equal(_marks(workspace), _mark(qo_indptr, lengths, window)), "the plan is of another step"
    firsts, pages = qo_indptr.tolist(), kv_indptr.tolist()
    for each, length in enumerate(lengths.tolist()):
        mine = indices[pages[each] : pages[each + 1]].long()
        found_keys, found = (part[mine].flatten(0, 1)[:length].double() for part in (keys, values))
        span = slice(firsts[each], firsts[each + 1])
        scaled = q[span].double() * scale
        out[span] = _attend(scaled, found_keys, found, window, causal=mask_mode == CAUSAL).to(out.dtype)


def _attend(q: Tensor, keys: Tensor, values: Tensor, window: int, *, causal: bool) -> Tensor:
    """Attend q [S, H, D] to keys and values [n, Hkv, D]; the last query is at the last key."""
    tokens, length, group = len(q), len(keys), q.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
    ages = torch.arange(length - tokens, length)[:, None] - torch.arange(length)
    hidden = (ages < 0) & causal | (ages > window) & (window >= 0)
    scores = torch.einsum("shd,nhd->hsn", q, keys).masked_fill(hidden, float("-inf"))
    return torch.einsum("hsn,nhd->shd", scores.softmax(dim=2), values)


def _append(*told: Any) -> None:
    k, v, owners, positions, keys, values, indices, indptr, last, layout = told
    assert layout == 0
    assert keys.stride() == values.stride()
    assert k.dtype == v.dtype == keys.dtype == values.dtype, "the kernel would reinterpret the bytes"
    for table in (owners, positions, indices, indptr, last):
        _require_table(table)
    page_tokens = keys.shape[1]
    pages = indices[(indptr[owners] + positions // page_tokens).long()].long()
    for part, new in ((keys, k), (values, v)):
        part[pages, (positions % page_tokens).long()] = new


def _rope(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, turns: Tensor, positions: Tensor, interleave: bool
) -> None:
    assert not interleave
    assert turns.dtype == torch.float32
    assert turns.is_contiguous()
    cos, sin = turns[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    for source, target in ((q, q_out), (k, k_out)):
        assert source.stride(2) == 1
        first, second = source.float().chunk(2, dim=-1)
        target.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def _rms_norm(out: Tensor, x: Tensor, weight: Tensor, epsilon: float, pdl: bool) -> None:
    assert not pdl
    assert x.dtype == weight.dtype == out.dtype, "the kernel would reinterpret the bytes"
    assert x.dim() in (2, 3)
    wide = x.float()
    out.copy_(wide * (wide.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt() * weight.float())


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, bool], None]:
    def run(out: Tensor, gate_up: Tensor, pdl: bool) -> None:
        assert not pdl
        assert gate_up.is_contiguous()
        gate, up = gate_up.float().chunk(2, dim=-1)
        out.copy_(activation(gate) * up)

    return run


_ACTIVATIONS = {
    "silu": _gated(torch.nn.functional.silu),
    "gelu_tanh": _gated(lambda gate: torch.nn.functional.gelu(gate, approximate="tanh")),
}


def _require_table(table: Tensor) -> None:
    assert table.dtype == torch.int32, "the kernels cast blindly"
    assert table.is_contiguous()


def _marks(workspace: Tensor) -> Tensor:
    return workspace[:24].view(torch.int64)


def _mark(qo_indptr: Tensor, lengths: Tensor, window: int) -> Tensor:
    weights = torch.arange(1, len(lengths) + 1)
    return torch.tensor([int((qo_indptr[1:] * weights).sum()), int((lengths * weights).sum()), window])
