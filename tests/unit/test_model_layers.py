"""Layers that differ: windows, and a second rope for those that have one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import edit, write_tiny
from tests.support.tiny_gguf import write_tiny_gguf
from twostroke.engine.backend import Activation
from twostroke.engine.config import RopeConfig, RopeScaling
from twostroke.engine.weights import read_config

LATER = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 64},
        {"model_type": "qwen3", "sliding_window": 64},
        {"model_type": "mistral", "sliding_window": None},
        {"sliding_window": 4_096},
        {"layer_types": ["full_attention", "full_attention"]},
    ],
)
def test_a_window_that_is_off_or_never_closes_is_none(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert read_config(edit(write_tiny(tmp_path), **changes)).windows == (None, None)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral"}, (4_096, 4_096)),
        ({"model_type": "mistral", "sliding_window": 64}, (64, 64)),
        (LATER | {"model_type": "qwen2"}, (None, 64)),
        (LATER | {"model_type": "qwen3"}, (None, 64)),
        (LATER | {"model_type": "qwen3", "layer_types": [SLIDING, FULL]}, (64, None)),
        ({"model_type": "gemma3_text"}, (4_096, 4_096)),
        ({"model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 2}, (64, None)),
        ({"model_type": "gemma3_text", "sliding_window": 64, "layer_types": [FULL, SLIDING]}, (None, 64)),
    ],
)
def test_windows_are_those_of_the_layers(
    tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert read_config(edit(write_tiny(tmp_path), **changes)).windows == windows


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e6, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_theta": None,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e6},
                SLIDING: {"rope_type": "default", "rope_theta": 2e4},
            },
        },
    ],
)
def test_both_ropes_of_a_model_with_two_are_read_in_every_spelling(tmp_path: Path, spelling: dict[str, Any]) -> None:
    config = read_config(edit(write_tiny(tmp_path, family="gemma3", window=24), **spelling))
    assert config.rope == RopeConfig(theta=5e6, scaling=RopeScaling.LINEAR, factor=8.0)
    assert config.rope_of_windows == config.local_rope == RopeConfig(theta=2e4)


def test_the_digest_of_two_ropes_covers_both(tmp_path: Path) -> None:
    config = read_config(write_tiny(tmp_path, family="gemma3", window=24, theta=1e6))
    others = [
        replace(config, rope=RopeConfig(theta=5e5)),
        replace(config, local_rope=RopeConfig(theta=5e5)),
        replace(config, local_rope=None),
        replace(config, rope=config.rope_of_windows, local_rope=config.rope),
    ]
    assert len({each.rope_digest for each in (config, *others)}) == 5


def test_whatever_changes_scores_changes_the_digest_of_the_arithmetic(tmp_path: Path) -> None:
    config = read_config(write_tiny(tmp_path, family="gemma3", window=24))
    others = [
        replace(config, windows=(None, 9)),
        replace(config, attention_scale=0.5),
        replace(config, norm_offset=0.0),
        replace(config, local_rope=RopeConfig(theta=5e5)),
    ]
    assert len({each.arithmetic_digest for each in (config, *others)}) == 5


def test_a_gguf_file_of_gemma_says_what_its_readers_must_know(tmp_path: Path) -> None:
    config = read_config(write_tiny_gguf(tmp_path / "m.gguf", family="gemma3", layers=7, window=24, theta=1e6))
    assert (config.architecture, config.activation) == ("gemma3_text", Activation.GELU_TANH)
    assert config.windows == (24, 24, 24, 24, 24, None, 24)
    assert (config.rope.theta, config.rope_of_windows.theta) == (1e6, 1e4)
    assert (config.norm_offset, config.attention.scale) == (0.0, 32**-0.5)


def test_scores_of_the_largest_gemma_are_scaled_by_its_hidden_size(tmp_path: Path) -> None:
    config = read_config(write_tiny_gguf(tmp_path / "m.gguf", family="gemma3", layers=62, hidden=32, window=24))
    assert config.attention.scale == (32 / 4) ** -0.5
