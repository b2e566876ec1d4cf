"""Weight modes name values: each rounds as it says, and every kernel multiplies with exactly those values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from torch import Tensor

from tests.support.backends import CPU
from twostroke.engine.backend import Backend
from twostroke.engine.backends.torch import TorchBackend
from twostroke.engine.matrix import Matrix, WeightMode, stored, stored_bytes
from twostroke.errors import ModelError

LARGEST = float(np.finfo(np.float32).max)
TINY = float(np.finfo(np.float32).tiny)
BACKENDS: dict[str, Callable[[], Backend]] = {
    "chosen for this machine": lambda: CPU,
    "torch": lambda: TorchBackend(packs=False),
    "torch, packed": lambda: TorchBackend(packs=True),
}


def matrices(largest: float = LARGEST) -> st.SearchStrategy[npt.NDArray[np.float32]]:
    """Any finite float32 matrix: zeros, subnormals and rows of very different size too."""
    shapes = array_shapes(min_dims=2, max_dims=2, max_side=6)
    bound = float(np.float32(largest))
    return arrays(np.float32, shapes, elements=st.floats(-bound, bound, width=32))


def rounded(weight: npt.NDArray[np.float32] | list[list[float]], mode: WeightMode) -> Matrix:
    return stored("w", torch.from_numpy(np.array(weight, dtype=np.float32)), mode)


def exact(matrix: Matrix) -> npt.NDArray[np.float64]:
    """The numbers that a stored matrix names."""
    values: npt.NDArray[np.float64] = matrix.values.double().numpy()
    return values if matrix.scales is None else values * matrix.scales.double().numpy()[:, None]


# Rounding


@given(matrices())
def test_f32_keeps_every_bit(weight: npt.NDArray[np.float32]) -> None:
    assert np.array_equal(rounded(weight, WeightMode.F32).values.numpy().view(np.uint32), weight.view(np.uint32))


@given(matrices(65_504.0))
def test_f16_is_the_nearest_half(weight: npt.NDArray[np.float32]) -> None:
    assert np.array_equal(exact(rounded(weight, WeightMode.F16)), weight.astype(np.float16).astype(np.float64))


@given(matrices(float(torch.finfo(torch.bfloat16).max)))
def test_bf16_is_the_upper_half_of_the_bits_rounded_to_even(weight: npt.NDArray[np.float32]) -> None:
    bits = weight.view(np.uint32)
    upper = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    assert np.array_equal(exact(rounded(weight, WeightMode.BF16)), upper.view(np.float32).astype(np.float64))


@given(matrices(3.4e38))
def test_int8_is_off_by_half_a_scale_at_most(weight: npt.NDArray[np.float32]) -> None:
    matrix = rounded(weight, WeightMode.INT8)
    assert matrix.scales is not None
    scales, largest = matrix.scales.double().numpy(), np.abs(weight).max(axis=1).astype(np.float64)
    assert np.allclose(scales, np.maximum(largest / 127, TINY), rtol=2**-23, atol=0)
    # Division and scale are float32's: beside a tie they may err by 127 * 2^-23 steps.
    assert (np.abs(weight - exact(matrix)) <= scales[:, None] * (0.5 + 127 * 2**-23)).all()
    assert matrix.values.abs().max() <= 127


@given(matrices(3.4e38), matrices(1.0))
def test_int8_rounds_each_row_by_itself(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> None:
    columns = min(one.shape[1], other.shape[1])
    parts = [one[:, :columns], other[:, :columns]]
    whole = exact(rounded(np.concatenate(parts), WeightMode.INT8))
    assert np.array_equal(whole, np.concatenate([exact(rounded(part, WeightMode.INT8)) for part in parts]))


@pytest.mark.parametrize(
    ("row", "values"),
    [
        ([127.0, 0.5, 1.5, 2.5, -0.5, -1.5], [127, 0, 2, 2, 0, -2]),  # ties go to the even step
        ([-254.0, 254.0, 2.0, 127.0], [-127, 127, 1, 64]),  # the range is symmetric
        ([0.0, -0.0, 0.0], [0, 0, 0]),
        ([3.4e38, -3.4e38, 0.0], [127, -127, 0]),
        ([TINY, -TINY / 2, TINY / 4], [1, 0, 0]),  # half a step is a tie; no scale is below the smallest normal number
    ],
)
def test_int8_on_rows_one_can_do_on_paper(row: list[float], values: list[int]) -> None:
    matrix = rounded([row], WeightMode.INT8)
    assert matrix.values.tolist() == [values]
    assert torch.isfinite(matrix.dense()).all()


@pytest.mark.parametrize("mode", [WeightMode.F16, WeightMode.BF16, WeightMode.INT8])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_value_beyond_the_mode_is_refused_with_the_name_of_its_tensor(mode: WeightMode, sign: int) -> None:
    with pytest.raises(ModelError, match=rf"tensor layers\.7\.up has values beyond {mode};"):
        stored("layers.7.up", torch.tensor([[0.0, sign * LARGEST]]), mode)


@pytest.mark.parametrize("mode", WeightMode)
def test_bytes_are_counted_as_they_are_stored(mode: WeightMode) -> None:
    shapes = [(5, 7), (3, 16), (9,)]
    held = [stored("w", torch.randn(shape), mode) for shape in shapes if len(shape) == 2]
    tensors = [each for matrix in held for each in (matrix.values, matrix.scales) if each is not None]
    assert stored_bytes(shapes, mode) == sum(each.nbytes for each in tensors) + 9 * 4


# Arithmetic


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("columns", [128, 160])  # whole tiles of int8, and not
@pytest.mark.parametrize("tokens", [1, 2, 5, 17, 100])
@pytest.mark.parametrize("mode", WeightMode)
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_a_product_is_that_of_exactly_the_stored_numbers(
    backend: Callable[[], Backend], mode: WeightMode, tokens: int, columns: int, biased: bool
) -> None:
    weight, x, bias = _operands(tokens, columns)
    matrix = stored("w", weight, mode, bias if biased else None)
    multiply = backend().linear(matrix)
    numbers = torch.from_numpy(exact(matrix))
    expected = x.double() @ numbers.T + (bias.double() if biased else 0)
    bound = 4e-6 * (x.double().abs() @ numbers.abs().T + 1)  # rounding of float32 sums, far below a step of any mode
    _assert_within(multiply(x), expected, bound)
    into = torch.ones_like(expected, dtype=torch.float32)
    multiply.add_to(into, x)
    _assert_within(into, expected + 1, bound)


@pytest.mark.parametrize("mode", WeightMode)
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_a_row_that_is_looked_up_holds_exactly_the_stored_numbers(
    backend: Callable[[], Backend], mode: WeightMode
) -> None:
    matrix = stored("w", _operands(1, 160)[0], mode)
    found = backend().embedding(matrix)(torch.tensor([3, 0, 3]))
    assert torch.equal(found, matrix.dense()[[3, 0, 3]])


def _operands(tokens: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """A weight whose rows differ in size a thousandfold, one of them zero; inputs; a bias."""
    seeded: dict[str, Any] = {"generator": torch.Generator().manual_seed(tokens)}
    weight = torch.randn(96, columns, **seeded) * torch.logspace(-2, 1, 96).unsqueeze(1)
    weight[5] = 0
    return weight, torch.randn(tokens, columns, **seeded), torch.randn(96, **seeded)


def _assert_within(found: Tensor, expected: Tensor, bound: Tensor) -> None:
    worst = ((found.double() - expected).abs() / bound).max()
    assert worst <= 1, f"{worst:.1f} times the bound"
