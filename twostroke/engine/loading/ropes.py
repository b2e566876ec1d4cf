"""Rope settings of a config.json, in the spellings of all versions of transformers."""

from __future__ import annotations

from twostroke.engine.config import RopeConfig, RopeScaling
from twostroke.engine.loading.dialects import Dialect
from twostroke.engine.loading.fields import Fields
from twostroke.errors import UnsupportedModel

_TYPES = {"default": RopeScaling.NONE, "linear": RopeScaling.LINEAR, "llama3": RopeScaling.LLAMA3}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_ropes(config: Fields, dialect: Dialect) -> tuple[RopeConfig, RopeConfig | None]:
    """Return how layers rotate, and how those with a window do, if that differs.

    Settings are in `rope_parameters` (transformers 5; one object for each kind of layer where they differ), or in
    `rope_scaling`, `rope_theta` and `rope_local_base_freq`; `rope_scaling` never concerns layers with a window.

    Raises:
        ModelError: a field is absent or has another type.
        UnsupportedModel: another rope type.
    """
    key = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    told = config.inner(key)
    by_kind = any(isinstance(value, dict) for value in told.items().values())
    if dialect.local_theta is None:
        if by_kind:
            raise UnsupportedModel(f"{key} that differ between layers are not supported in this architecture")
        return _rope(config, told, config.number("rope_theta", dialect.theta)), None
    if by_kind != (key == "rope_parameters"):
        raise UnsupportedModel(f"{key} of this architecture are read for each kind of layer, or as rope_scaling")
    full, local = (told.inner(_FULL), told.inner(_SLIDING)) if by_kind else (told, Fields("config.json", {}))
    return (
        _rope(config, full, config.number("rope_theta", dialect.theta)),
        _rope(config, local, config.number("rope_local_base_freq", dialect.local_theta)),
    )


def _rope(config: Fields, told: Fields, theta: float) -> RopeConfig:
    kind = told.text("rope_type", told.text("type", "default"))  # `type` is the older spelling
    if kind not in _TYPES:
        raise UnsupportedModel(f"rope type {kind} is not supported; {', '.join(_TYPES)} are")
    if any(where.number("partial_rotary_factor", 1.0) != 1.0 for where in (config, told)):
        raise UnsupportedModel("partial_rotary_factor is not supported")
    theta = told.number("rope_theta", theta)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, scaling=RopeScaling.LINEAR, factor=told.number("factor"))
    positions = config.integer("max_position_embeddings")
    return RopeConfig(
        theta=theta,
        scaling=RopeScaling.LLAMA3,
        factor=told.number("factor"),
        low_freq_factor=told.number("low_freq_factor"),
        high_freq_factor=told.number("high_freq_factor"),
        original_max_positions=told.integer("original_max_position_embeddings", positions),
    )
