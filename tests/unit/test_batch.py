"""The flat layout of a step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.engine.batch import Segment, build_batch
from twostroke.errors import Internal


def test_two_segments_lie_one_after_the_other() -> None:
    decode = Segment([7], start=5, pages=[9, 2], sample=True)
    chunk = Segment([1, 2, 3], start=3, pages=[4, 8], sample=False)
    batch = build_batch([decode, chunk], page_tokens=4)
    assert batch.token_ids.tolist() == [7, 1, 2, 3]
    assert batch.positions.tolist() == [5, 3, 4, 5]
    assert batch.qo_indptr.tolist() == [0, 1, 4]
    assert batch.kv_indptr.tolist() == [0, 2, 4]
    assert batch.kv_indices.tolist() == [9, 2, 4, 8]
    assert batch.kv_last_page_len.tolist() == [2, 2]
    assert batch.slot_page.tolist() == [2, 4, 8, 8]
    assert batch.slot_offset.tolist() == [1, 3, 0, 1]
    assert batch.sample_rows.tolist() == [0]


@given(st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40), st.booleans()), min_size=1, max_size=8))
def test_slots_are_unique_and_every_table_adds_up(shapes: list[tuple[int, int, bool]]) -> None:
    segments, page = [], 1
    for start, length, sample in shapes:
        needed = -(-(start + length) // 16)
        segments.append(Segment(range(length), start, range(page, page + needed + 2), sample))  # two pages to spare
        page += needed + 2
    batch = build_batch(segments, 16)
    slots = set(zip(batch.slot_page.tolist(), batch.slot_offset.tolist(), strict=True))
    lengths = (batch.kv_indptr.diff() - 1) * 16 + batch.kv_last_page_len
    assert len(slots) == len(batch.token_ids) == int(batch.qo_indptr[-1])
    assert lengths.tolist() == [start + length for start, length, _ in shapes]
    assert len(batch.kv_indices) == int(batch.kv_indptr[-1])
    assert len(batch.sample_rows) == sum(sample for _, _, sample in shapes)


@pytest.mark.parametrize(
    "segments", [[], [Segment([], 0, [1], True)], [Segment([1] * 17, 0, [1], True)], [Segment([1], 16, [1], True)]]
)
def test_a_batch_that_cannot_be_laid_out_is_refused(segments: list[Segment]) -> None:
    with pytest.raises(Internal):
        build_batch(segments, 16)
