"""Pages that are moved through staging memory, on a CPU that plays the device; and those that lie in host memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.support.staged import HostStream
from twostroke.engine.cuda import pages as staged
from twostroke.engine.cuda.pages import StagedPages
from twostroke.kv.transport.pages import HostPages, Pages, Row

PAGES, PAGE_BYTES = 40, 64


@pytest.fixture
def rows() -> npt.NDArray[np.uint8]:
    return np.random.default_rng(3).integers(0, 256, (PAGES, PAGE_BYTES), dtype=np.uint8)


@pytest.fixture(params=["host", "staged", "staged one by one"])
def pages(request: pytest.FixtureRequest, rows: npt.NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch) -> Pages:
    if request.param == "host":
        return HostPages(rows)
    monkeypatch.setattr(staged, "_STAGE_BYTES", PAGE_BYTES * (3 if request.param == "staged" else 1))
    return StagedPages(torch.from_numpy(rows).view(torch.float32).view(PAGES, 2, 8), HostStream())


def writing(source: npt.NDArray[np.uint8], *, good: int) -> Callable[[int, Row], bool]:
    def put(index: int, row: Row) -> bool:
        np.copyto(row, source[index])
        return index < good

    return put


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 7, 12])
def test_pages_are_read_by_number_and_in_order(pages: Pages, rows: npt.NDArray[np.uint8], count: int) -> None:
    numbers = [(7 * each + 3) % PAGES for each in range(count)]
    seen: list[tuple[int, bytes]] = []
    pages.read(numbers, lambda index, row: seen.append((index, row.tobytes())))
    assert seen == [(index, rows[page].tobytes()) for index, page in enumerate(numbers)]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 7, 12])
def test_pages_are_written_by_number_and_no_other_page_changes(
    pages: Pages, rows: npt.NDArray[np.uint8], count: int
) -> None:
    before, source = rows.copy(), np.random.default_rng(4).integers(0, 256, (count, PAGE_BYTES), dtype=np.uint8)
    numbers = [(11 * each + 5) % PAGES for each in range(count)]
    assert pages.write(numbers, writing(source, good=count)) == count
    before[numbers] = source
    assert np.array_equal(rows, before)


@pytest.mark.parametrize("good", range(8))
def test_writing_ends_at_the_first_page_whose_bytes_are_no_good(
    pages: Pages, rows: npt.NDArray[np.uint8], good: int
) -> None:
    source = np.random.default_rng(5).integers(0, 256, (9, PAGE_BYTES), dtype=np.uint8)
    numbers = list(range(9, 0, -1))
    untouched = rows[numbers[good + 1 :]].copy()
    assert pages.write(numbers, writing(source, good=good)) == good
    assert np.array_equal(rows[numbers[:good]], source[:good])
    assert np.array_equal(rows[numbers[good + 1 :]], untouched)


def test_a_page_knows_its_size(pages: Pages) -> None:
    assert pages.block_bytes == PAGE_BYTES
