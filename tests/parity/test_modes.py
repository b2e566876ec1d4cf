"""Every weight mode against transformers over the values that the mode names, and against the other modes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.backends import CPU
from tests.support.forward import all_logits
from tests.support.oracle import Oracle
from tests.support.tiny import write_tiny
from twostroke.engine.weights import WeightMode, load_model

TOKENS = [(7 * n * n + 3 * n) % 256 for n in range(150)]
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied with biases": {"attention_bias": True, "tied": False},
    "qwen2": {"family": "qwen2", "seed": 3},
}


@pytest.mark.parametrize("mode", WeightMode)
@pytest.mark.parametrize("what", SHAPES.values(), ids=SHAPES)
def test_logits_equal_those_of_transformers_over_the_same_values(
    tmp_path: Path, what: dict[str, Any], mode: WeightMode
) -> None:
    folder = write_tiny(tmp_path / "model", **what)
    expected = Oracle.folder(folder).round(mode).logits(TOKENS)
    found = all_logits(load_model(folder, mode=mode, backend=CPU), TOKENS)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("mode", WeightMode)
def test_a_prompt_in_chunks_scores_as_a_whole_in_every_mode(tmp_path: Path, mode: WeightMode) -> None:
    loaded = load_model(write_tiny(tmp_path / "model"), mode=mode, backend=CPU)
    whole, pieces = all_logits(loaded, TOKENS), all_logits(loaded, TOKENS, chunks=[15, 1, 1, 60])
    torch.testing.assert_close(pieces, whole, atol=2e-4, rtol=0)


def test_modes_differ_by_more_than_the_bound_so_that_the_tests_above_would_notice(tmp_path: Path) -> None:
    oracle = Oracle.folder(write_tiny(tmp_path / "model"))
    scores = {mode: oracle.round(mode).logits(TOKENS) for mode in WeightMode}
    for mode in (WeightMode.BF16, WeightMode.INT8):
        assert all((scores[mode] - scores[other]).abs().max() > 1e-2 for other in WeightMode if other is not mode)
