"""How a text is cut to be measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.engine.passages import cut
from twostroke.errors import InvalidRequest

BOS = 1_000


@given(
    length=st.integers(6, 300),
    bos=st.sampled_from([None, BOS]),
    window=st.integers(2, 64),
    prompts=st.integers(1, 9),
)
def test_windows_cover_the_text_and_prompts_are_parts_of_it(
    length: int, bos: int | None, window: int, prompts: int
) -> None:
    text, lead = tuple(range(length)), () if bos is None else (bos,)
    passages = cut(text, bos=bos, window=window, prompts=prompts, prompt_tokens=5)
    joined = sum((each[len(lead) :] for each in passages.windows), ())
    assert all(each[: len(lead)] == lead for each in (*passages.windows, *passages.prompts))
    assert all(2 <= len(each) <= window for each in passages.windows)
    assert joined == text[: len(joined)]
    assert length - len(joined) <= 1  # a single token, with nothing before it, cannot be scored
    assert passages.tokens == len(joined) + len(lead) * len(passages.windows)
    starts = [each[len(lead)] for each in passages.prompts]
    assert [each[len(lead) :] for each in passages.prompts] == [text[start : start + 5] for start in starts]
    assert 1 <= len(starts) <= prompts
    assert len(set(starts)) == len(starts)
    assert len(starts) == prompts or len(starts) == length - 5


def test_prompts_are_spread_over_the_text() -> None:
    passages = cut(range(105), bos=None, window=50, prompts=4, prompt_tokens=5)
    assert [each[0] for each in passages.prompts] == [0, 25, 50, 75]


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="the text has 5 tokens; at least 6 are needed"):
        cut(range(5), bos=None, window=50, prompts=1, prompt_tokens=5)
