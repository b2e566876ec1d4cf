"""The GPU's backend over emulated kernels: our calls and tables are right. Nothing here says that a kernel is.

Attention itself is held to the reference beside the other backends, in test_attention.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.backends import BACKENDS
from tests.support.emulated import emulated_backend
from tests.support.engines import answer, asked, prompt_of
from tests.support.forward import all_logits
from tests.support.tiny import write_tiny
from twostroke.engine.attention.flashinfer import require_int32
from twostroke.engine.backend import Activation, Backend
from twostroke.engine.backends.flashinfer import FlashInferBackend
from twostroke.engine.backends.torch import TorchBackend
from twostroke.engine.batch import Segment, build_batch
from twostroke.engine.engine import Engine, EngineSettings
from twostroke.engine.matrix import Matrix
from twostroke.engine.weights import LoadedModel, WeightMode, load_model
from twostroke.errors import Internal
from twostroke.types import SamplingParams

TOKENS = [(7 * n * n + 3 * n) % 256 for n in range(90)]
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with one key-value head": {"kv_heads": 1, "tied": False},
    "qwen2 with biases": {"family": "qwen2"},
    "qwen3 with norms of heads": {"family": "qwen3"},
    "gemma3 with windows": {"family": "gemma3", "window": 16},
}


def torch_backend() -> Backend:
    return BACKENDS["torch"]()


@pytest.fixture(scope="module")
def emulated() -> FlashInferBackend:
    return emulated_backend()


def loaded(folder: Path, backend: Backend, mode: WeightMode = WeightMode.F32, **what: Any) -> LoadedModel:
    return load_model(write_tiny(folder, **what), mode=mode, backend=backend)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("what", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("chunks", [[], [33, 1, 1, 40]], ids=["whole", "in chunks"])
def test_emulated_logits_equal_those_of_torch(
    tmp_path: Path, emulated: FlashInferBackend, what: dict[str, Any], chunks: list[int]
) -> None:
    expected = all_logits(loaded(tmp_path / "model", torch_backend(), **what), TOKENS)
    found = all_logits(loaded(tmp_path / "model", emulated, **what), TOKENS, chunks=chunks)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("mode", [WeightMode.BF16, WeightMode.F16])
@pytest.mark.parametrize("what", SHAPES.values(), ids=SHAPES)
def test_emulated_half_precision_is_near_torch_on_the_same_weights(
    tmp_path: Path, what: dict[str, Any], mode: WeightMode
) -> None:
    half = emulated_backend(torch.bfloat16 if mode is WeightMode.BF16 else torch.float16)
    expected = all_logits(loaded(tmp_path / "model", torch_backend(), mode, **what), TOKENS)
    found = all_logits(loaded(tmp_path / "model", half, mode, **what), TOKENS)
    error = (found - expected).norm() / expected.norm()
    assert error < (0.03 if mode is WeightMode.BF16 else 0.004)


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, seed=5)])
async def test_an_engine_over_emulated_kernels_answers_as_one_over_torch(
    tmp_path: Path, emulated: FlashInferBackend, sampling: SamplingParams
) -> None:
    requests = [asked(prompt_of(length, length), sampling=sampling) for length in (5, 40, 17, 70)]
    told = []
    for backend in (torch_backend(), emulated):
        model = loaded(tmp_path / "model", backend)
        settings = EngineSettings(pages=65, tokens_per_step=32, max_running=4)
        async with Engine.start(settings, model.model, model.kv_format()) as engine:
            told.append([(await answer(engine, request)).ids for request in requests])
    assert told[0] == told[1]


def test_emulated_norms_equal_those_of_torch_for_rows_and_for_heads_of_a_view(emulated: FlashInferBackend) -> None:
    weight, heads = random(16, seed=1), random(7, 6, 16)
    for x in (random(7, 16), heads[:, 1:4]):
        expected = TorchBackend(packs=False).rms_norm(x, weight, 1e-5)
        torch.testing.assert_close(emulated.rms_norm(x, emulated.vector(weight), 1e-5), expected)


def test_a_norm_whose_weights_would_be_rounded_is_computed_in_float32() -> None:
    half = emulated_backend(torch.bfloat16)
    exact, odd = torch.tensor([1.0, 1.5] * 8), torch.full((16,), 1.0009765625)
    assert half.vector(exact).dtype == torch.bfloat16
    assert half.vector(odd).dtype == torch.float32
    x = random(5, 16).bfloat16()
    expected = TorchBackend(packs=False).rms_norm(x.float(), odd, 1e-5).bfloat16()
    assert torch.equal(half.rms_norm(x, half.vector(odd), 1e-5), expected)


@pytest.mark.parametrize("heads", [1, 5])
def test_emulated_rotation_equals_that_of_torch_in_place_of_a_view(emulated: FlashInferBackend, heads: int) -> None:
    fused, turns = random(9, 8, 16), random(9, 16, seed=2)
    ours, theirs = fused.clone(), fused.clone()
    emulated.rotate(ours[:, :heads], turns)
    TorchBackend(packs=False).rotate(theirs[:, :heads], turns)
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(ours[:, heads:], fused[:, heads:])


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("size", [16, 5], ids=["fused", "too odd to be fused"])
def test_emulated_gates_equal_those_of_torch(emulated: FlashInferBackend, activation: Activation, size: int) -> None:
    gate_up = random(6, 2 * size)
    expected = TorchBackend(packs=False).gated(gate_up, activation)
    torch.testing.assert_close(emulated.gated(gate_up, activation), expected)


@pytest.mark.parametrize("bias", [None, 1.5, 1.0009765625], ids=["no bias", "bias", "bias that would be rounded"])
def test_half_precision_linears_add_their_bias_once_and_unrounded(bias: float | None) -> None:
    half = emulated_backend(torch.bfloat16)
    weight, x, into = random(12, 16).bfloat16(), random(4, 16, seed=1).bfloat16(), random(4, 12, seed=2).bfloat16()
    linear = half.linear(Matrix(weight, bias=None if bias is None else torch.full((12,), bias)))
    product = x.double() @ weight.double().T + (bias or 0.0)
    torch.testing.assert_close(linear(x).double(), product, atol=0.05, rtol=0.01)
    expected = into.double() + product
    linear.add_to(into, x)
    torch.testing.assert_close(into.double(), expected, atol=0.05, rtol=0.01)


def test_tables_of_another_type_are_refused() -> None:
    batch = build_batch([Segment((1, 2), 0, (1,), sample=True)], 16)
    require_int32(batch)
    with pytest.raises(Internal, match="int64"):
        require_int32(replace(batch, kv_indices=batch.kv_indices.long()))


PASSED: Mapping[str, str] = {
    "BatchPrefillWithPagedKVCacheWrapper": "backend",
    "BatchPrefillWithPagedKVCacheWrapper.plan": "num_qo_heads num_kv_heads head_dim_qk page_size causal sm_scale"
    " window_left q_data_type kv_data_type o_data_type non_blocking max_token_per_sequence",
    "BatchPrefillWithPagedKVCacheWrapper.run": "out enable_pdl",
    "BatchDecodeWithPagedKVCacheWrapper": "use_cuda_graph use_tensor_cores paged_kv_indptr_buffer backend"
    " paged_kv_indices_buffer paged_kv_last_page_len_buffer",
    "BatchDecodeWithPagedKVCacheWrapper.plan": "num_qo_heads num_kv_heads head_dim page_size window_left sm_scale"
    " q_data_type kv_data_type o_data_type non_blocking",
    "BatchDecodeWithPagedKVCacheWrapper.run": "out enable_pdl",
    "decode.fast_decode_plan": "num_qo_heads num_kv_heads head_dim page_size window_left sm_scale q_data_type"
    " kv_data_type non_blocking global_override_indptr_cpu",
    "append_paged_kv_cache": "kv_layout",
    "rmsnorm": "enable_pdl",
    "silu_and_mul": "enable_pdl",
    "gelu_tanh_and_mul": "enable_pdl",
    "apply_rope_with_cos_sin_cache_inplace": "is_neox",
}


@pytest.mark.parametrize("path", PASSED)
def test_the_installed_package_takes_every_keyword_that_we_pass(emulated: FlashInferBackend, path: str) -> None:
    found: Any = emulated._package
    for name in path.split("."):
        found = getattr(found, name)
    taken = inspect.signature(found).parameters
    assert set(PASSED[path].split()) <= set(taken)
