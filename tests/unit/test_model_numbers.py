"""Every floating-point number of a model's description is one that float32 can be computed with."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny import edit, write_tiny
from tests.support.tiny_gguf import write_gguf
from twostroke.engine.config import RopeConfig, RopeScaling
from twostroke.engine.rope import inverse_frequencies, rotation
from twostroke.engine.weights import read_config
from twostroke.errors import ModelError

NO_NUMBERS = [float("inf"), float("-inf"), float("nan")]
ROPE = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FACTORS = [each.name for each in dataclasses.fields(RopeConfig) if each.type == "float"]


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("llama", "rms_norm_eps"),
        ("llama", "rope_theta"),
        ("gemma3", "rope_local_base_freq"),
        ("gemma3", "query_pre_attn_scalar"),
    ],
)
def test_a_number_of_a_folder_that_is_none_is_refused_by_key(
    family: str, key: str, value: float, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=f"{key} is not a number"):
        read_config(edit(write_tiny(tmp_path, family=family), sliding_window=16, **{key: value}))


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor", "rope_theta"])
def test_a_number_of_a_folders_rope_that_is_none_is_refused_by_key(key: str, value: float, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{key} is not a number"):
        read_config(edit(write_tiny(tmp_path), rope_scaling=ROPE | {key: value}))


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize(
    "key", ["rope.freq_base", "rope.scale_linear", "attention.layer_norm_rms_epsilon", "attention.scale"]
)
def test_a_number_of_a_gguf_file_that_is_none_is_refused_by_key(key: str, value: float, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"llama.{key} is {value}"):
        read_config(write_gguf(tmp_path / "m.gguf", **{f"llama.{key}": value}))


@pytest.mark.parametrize("value", [*NO_NUMBERS, 0.0, -1.0, 1e-300, 1e300])
@pytest.mark.parametrize("name", FACTORS)
def test_a_rope_factor_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ModelError, match=f"rope {name} is"):
        RopeConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [*NO_NUMBERS, 0.0, 1e-300])
def test_a_rope_divisor_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(ModelError, match="rope divisors"):
        RopeConfig(divisors=(1.0, value))


ALLOWED = st.floats(1e-9, 1e12)


@given(ALLOWED, ALLOWED, ALLOWED, st.sampled_from(RopeScaling), st.booleans())
def test_what_is_allowed_rotates_by_finite_angles(
    theta: float, factor: float, divisor: float, scaling: RopeScaling, divided: bool
) -> None:
    rope = RopeConfig(theta=theta, factor=factor, scaling=scaling, divisors=(divisor,) * 8 if divided else None)
    assert torch.isfinite(rotation(inverse_frequencies(rope, 16), torch.tensor([0, 1, 1 << 20]))).all()
