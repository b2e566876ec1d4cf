"""How far back each layer looks, as a config.json tells it."""

from __future__ import annotations

from twostroke.engine.loading.dialects import Dialect, Windows
from twostroke.engine.loading.fields import Fields
from twostroke.errors import ModelError, UnsupportedModel

_FULL, _SLIDING = "full_attention", "sliding_attention"
_DEFAULT_WINDOW, _DEFAULT_PATTERN, _DEFAULT_FULL_LAYERS = 4_096, 6, 28  # transformers', for all that have them


def layer_windows(config: Fields, dialect: Dialect, layers: int) -> tuple[int | None, ...]:
    """Return for each layer how many of the latest tokens a query sees, its own included; None sees all.

    Raises:
        ModelError: layer_types do not match the layers, or name windows of no size.
        UnsupportedModel: other kinds of layers, or windows that the architecture does not have.
    """
    window = _window(config, dialect)
    usual = tuple(_usual_kind(config, dialect, window, layer) for layer in range(layers))
    kinds = config.texts("layer_types") or usual
    if len(kinds) != layers:
        raise ModelError(f"{len(kinds)} layer_types for {layers} layers")
    for kind in kinds:
        if kind not in (_FULL, _SLIDING):
            raise UnsupportedModel(f"layer_types: {kind} is not supported; {_FULL} and {_SLIDING} are")
    if kinds != usual and dialect.windows in (Windows.NEVER, Windows.EVERY):
        raise UnsupportedModel("layer_types with some layers unlike the others are not supported in this architecture")
    if window is None and _SLIDING in kinds:
        raise ModelError(f"layer_types: {_SLIDING} without a sliding_window")
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _window(config: Fields, dialect: Dialect) -> int | None:
    """Return the size of windows, None where there are none; null is not the same as absent here."""
    if dialect.windows is Windows.LATER and not config.flag("use_sliding_window", False):
        return None
    if "sliding_window" in config.items():
        window = config.integer("sliding_window") if "sliding_window" in config else None
    else:
        window = None if dialect.windows is Windows.NEVER else _DEFAULT_WINDOW
    if window is None or dialect.windows is not Windows.NEVER:
        return window
    if window < config.integer("max_position_embeddings"):
        raise UnsupportedModel(f"sliding_window of {window} tokens is not supported in this architecture")
    return None


def _usual_kind(config: Fields, dialect: Dialect, window: int | None, layer: int) -> str:
    if dialect.windows is Windows.BETWEEN:
        pattern = config.integer("sliding_window_pattern", _DEFAULT_PATTERN)
        if pattern < 1:
            raise ModelError(f"sliding_window_pattern is {pattern}; it must be at least 1")
        return _SLIDING if (layer + 1) % pattern else _FULL
    if window is None or dialect.windows is Windows.NEVER:
        return _FULL
    first = config.integer("max_window_layers", _DEFAULT_FULL_LAYERS) if dialect.windows is Windows.LATER else 0
    return _SLIDING if layer >= first else _FULL
