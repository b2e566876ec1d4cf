"""Weights in a mapped file: as fast as copies where the system has huge pages for it, and read in place only then."""

from __future__ import annotations

import ctypes
import mmap
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.backends import native_backend
from twostroke.engine.loading.draft import Draft
from twostroke.engine.loading.mapped import in_huge_pages, map_file
from twostroke.engine.loading.prepared import PreparedFile
from twostroke.engine.loading.shelf import WeightsCache
from twostroke.engine.matrix import Matrix, WeightMode, stored

HUGE_PAGE = 1 << 21
PACKED = [WeightMode.F16, WeightMode.BF16, WeightMode.INT8]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def prepared(folder: Path, *sizes: int) -> tuple[PreparedFile, list[Tensor]]:
    """A prepared file of parts of these sizes, and what was written."""
    cache = WeightsCache(folder=folder / "weights")
    assert cache.is_usable()
    written = [torch.arange(size, dtype=torch.int64).mul(index + 7).to(torch.int8) for index, size in enumerate(sizes)]
    draft = cache.claim("m.safetensors", size=sum(sizes), header_bytes=100_000)
    assert isinstance(draft, Draft)
    with closing(draft):
        for index, part in enumerate(written):
            draft.add(f"part {index}", part)
        draft.publish()
    return PreparedFile(cache.folder / "m.safetensors"), written


@pytest.mark.parametrize(
    "sizes",
    [
        (HUGE_PAGE,),
        (HUGE_PAGE - 102_400, 1, 63, 64, 65),  # fills the page that begins with the header
        (3 * HUGE_PAGE + 1, 2 * HUGE_PAGE - 1, 5),
        (1, HUGE_PAGE, 1, HUGE_PAGE, 1),
    ],
)
def test_parts_of_any_size_come_back_from_whole_huge_pages(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    file, written = prepared(tmp_path, *sizes)
    for index, part in enumerate(written):
        assert torch.equal(file.take(f"part {index}", len(part)), part)


def huge_pages_are_free(path: Path) -> bool:
    """Whether a file that is written at once is mapped in huge pages now."""
    path.write_bytes(b"\1" * (32 * HUGE_PAGE))
    with path.open("rb") as file:
        return in_huge_pages(map_file(file.fileno(), 32 * HUGE_PAGE))


def test_a_prepared_file_is_mapped_in_huge_pages_where_the_file_system_has_them(tmp_path: Path) -> None:
    if not huge_pages_are_free(tmp_path / "before"):
        pytest.skip("files are mapped in small pages here")
    file, _ = prepared(tmp_path, *[HUGE_PAGE // 3] * 96)
    assert file.in_huge_pages or not huge_pages_are_free(tmp_path / "after")


def test_a_file_in_small_pages_is_not_taken_for_a_fast_one(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(bytes(10 * mmap.PAGESIZE))
    with (tmp_path / "small").open("rb") as small:
        assert not in_huge_pages(map_file(small.fileno(), 10 * mmap.PAGESIZE))


@pytest.mark.parametrize("shared", [True, False])
def test_kernels_read_values_in_place_when_these_are_in_huge_pages_and_a_copy_otherwise(shared: bool) -> None:
    backend, x = native_backend(), drawn(3, 64)
    matrix = replace(stored("w", drawn(32, 64), WeightMode.F16), in_huge_pages=shared)
    linear = backend.linear(matrix)
    before = linear(x)
    matrix.values.zero_()
    assert torch.equal(linear(x), torch.zeros_like(before) if shared else before)


@pytest.mark.skipif(sys.platform != "linux", reason="guards memory by mprotect")
@pytest.mark.parametrize("mode", PACKED)
@pytest.mark.parametrize("processor", ["native", "x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (17, 96), (31, 34), (64, 64), (96, 576)])
def test_kernels_read_nothing_behind_a_matrix(processor: str, mode: WeightMode, rows: int, columns: int) -> None:
    backend = native_backend(processor, threads=2)
    matrix = stored("w", drawn(rows, columns), mode)
    guarded = Matrix(at_the_end_of_memory(matrix.values), matrix.scales, in_huge_pages=True)
    for tokens in (1, 2, 5, 8, 17, 33, 64):
        x = drawn(tokens, columns)
        assert torch.equal(backend.linear(guarded)(x), backend.linear(matrix)(x))


def at_the_end_of_memory(tensor: Tensor) -> Tensor:
    """A copy whose last byte is followed by a page that nobody may touch, as at the end of a mapped file."""
    pages = -(-tensor.nbytes // mmap.PAGESIZE)
    memory = torch.frombuffer(mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE), dtype=torch.uint8)
    end = pages * mmap.PAGESIZE
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.data_ptr() + end), mmap.PAGESIZE, 0):
        raise OSError("the page cannot be guarded")
    return memory[end - tensor.nbytes : end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
