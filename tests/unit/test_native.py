"""Our own kernels against float64, in every mode and on every kind of processor this machine can play."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.backends import CPU, native_backend
from twostroke.engine.backend import Activation, Backend
from twostroke.engine.backends.native import NativeBackend
from twostroke.engine.backends.torch import TorchBackend
from twostroke.engine.matrix import Matrix, WeightMode, stored

PROCESSORS = ["native", "x86-64-v3", "x86-64-v4"]
PACKED = [WeightMode.F16, WeightMode.BF16, WeightMode.INT8]
TORCH = TorchBackend(packs=False)


@pytest.fixture(params=PROCESSORS)
def backend(request: pytest.FixtureRequest) -> NativeBackend:
    return native_backend(request.param)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact(matrix: Matrix, x: Tensor) -> Tensor:
    product = x.double() @ matrix.dense().double().T
    return product if matrix.bias is None else product + matrix.bias.double()


def allowed(backend: NativeBackend, matrix: Matrix, x: Tensor) -> Tensor:
    """What sums may be off by, for each unit of the sum of magnitudes.

    Inputs of many tokens keep 16 bits on tiles; 24, which is as many as float32 has, beside int8 in whole tiles.
    """
    rows, columns = matrix.values.shape
    in_integers = matrix.values.dtype == torch.int8 and rows % 32 == 0 and columns % 64 == 0
    each = 2**-15 if backend.on_tiles and len(x) >= 8 and not in_integers else 4e-6
    magnitude = x.double().abs() @ matrix.dense().double().abs().T
    if matrix.bias is not None:
        magnitude = magnitude + matrix.bias.abs()
    return each * magnitude + 1e-9


@settings(deadline=None, max_examples=150)
@given(
    tokens=st.integers(1, 70),
    rows=st.integers(1, 100) | st.sampled_from([32, 64, 192]),
    columns=st.integers(1, 200) | st.sampled_from([64, 128]),
    mode=st.sampled_from(PACKED),
    processor=st.sampled_from(PROCESSORS),
    threads=st.sampled_from([1, 2]),
    biased=st.booleans(),
    add=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_any_product_is_as_near_to_float64_as_its_parts_allow(
    tokens: int,
    rows: int,
    columns: int,
    mode: WeightMode,
    processor: str,
    threads: int,
    biased: bool,
    add: bool,
    seed: int,
) -> None:
    matrix = stored("w", drawn(rows, columns, seed=seed), mode, drawn(rows, seed=seed + 1) if biased else None)
    x = drawn(tokens, columns, seed=seed + 2)
    backend = native_backend(processor, threads=threads)
    linear = backend.linear(matrix)
    before = drawn(tokens, rows, seed=seed + 3)
    found, expected = (before.clone(), before.double() + exact(matrix, x)) if add else (linear(x), exact(matrix, x))
    if add:
        linear.add_to(found, x)
    assert ((found.double() - expected).abs() <= allowed(backend, matrix, x) + 1e-6 * before.abs() * add).all()


@pytest.mark.parametrize("rows", [700, 704])
@pytest.mark.parametrize("tokens", [1, 3, 8, 20, 300])
@pytest.mark.parametrize("mode", PACKED)
def test_a_matrix_of_a_real_size_multiplies_right(
    backend: NativeBackend, mode: WeightMode, tokens: int, rows: int
) -> None:
    matrix, x = stored("w", drawn(rows, 1_536), mode), drawn(tokens, 1_536, seed=1)
    assert ((backend.linear(matrix)(x).double() - exact(matrix, x)).abs() <= allowed(backend, matrix, x)).all()


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("mode", [WeightMode.F16, WeightMode.INT8])
def test_weights_and_inputs_of_any_magnitude_keep_their_precision(
    backend: NativeBackend, mode: WeightMode, tokens: int
) -> None:
    spread = 10.0 ** (torch.arange(32) % 13 - 9.0)  # down to numbers that float16 holds as subnormals or zero
    matrix = stored("w", drawn(32, 128) * spread[:, None], mode)
    x = drawn(tokens, 128, seed=1) * 10.0 ** (torch.arange(tokens) % 7 - 3.0)[:, None]
    assert ((backend.linear(matrix)(x).double() - exact(matrix, x)).abs() <= allowed(backend, matrix, x)).all()


@pytest.mark.parametrize("tokens", [1, 4, 20, 300])
def test_inputs_beside_int8_keep_all_bits_of_float32(backend: NativeBackend, tokens: int) -> None:
    matrix = stored("w", torch.ones(64, 64), WeightMode.INT8)
    x = torch.linspace(1, 2, tokens + 1)[1:, None] * torch.ones(64)  # alike, so that what is lost of each adds up
    torch.testing.assert_close(backend.linear(matrix)(x).double(), exact(matrix, x), rtol=2**-19, atol=0)


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("mode", [WeightMode.F16, WeightMode.INT8])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_number_that_is_none_spoils_its_own_token_and_no_other(
    backend: NativeBackend, mode: WeightMode, tokens: int, bad: float
) -> None:
    matrix, x = stored("w", drawn(64, 64), mode), drawn(tokens, 64, seed=1)
    x[-1, 5] = bad
    found = backend.linear(matrix)(x)
    assert not found[-1].isfinite().any()
    assert found[:-1].isfinite().all()


@pytest.mark.parametrize("size", [16, 20, 64, 576])
def test_norms_rotations_and_gates_equal_those_of_torch(backend: NativeBackend, size: int) -> None:
    x, weight = drawn(7, size), drawn(size, seed=1)
    torch.testing.assert_close(backend.rms_norm(x, weight, 1e-5), TORCH.rms_norm(x, weight, 1e-5))
    heads = drawn(5, 6, size, seed=2)
    torch.testing.assert_close(backend.rms_norm(heads, weight, 1e-6), TORCH.rms_norm(heads, weight, 1e-6))
    angles = 50 * drawn(5, size // 2, seed=3)
    turns = torch.cat((angles.cos(), angles.sin()), dim=1)
    ours, theirs = heads.clone(), heads.clone()
    backend.rotate(ours[:, 1:4], turns)
    TORCH.rotate(theirs[:, 1:4], turns)
    torch.testing.assert_close(ours, theirs)
    gate_up = 20 * drawn(4, 2 * size, seed=4)
    for activation in Activation:
        torch.testing.assert_close(
            backend.gated(gate_up, activation), TORCH.gated(gate_up, activation), atol=2e-5, rtol=2e-6
        )


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    def results(backend: Backend) -> list[Tensor]:
        matrices = [stored("w", drawn(1_000, 576), mode) for mode in PACKED]
        return [backend.linear(matrix)(drawn(tokens, 576, seed=1)) for matrix in matrices for tokens in (1, 9, 50)]

    for one, three in zip(results(native_backend()), results(native_backend(threads=3)), strict=True):
        assert torch.equal(one, three)


def test_matrices_of_mode_f32_stay_with_blas() -> None:
    matrix, x = stored("w", drawn(30, 64), WeightMode.F32), drawn(3, 64, seed=1)
    torch.testing.assert_close(CPU.linear(matrix)(x), TORCH.linear(matrix)(x), atol=0, rtol=0)
