"""The JSON of the model list."""

from __future__ import annotations

from services.router.gateway.generator import Generator, ModelCard
from services.router.gateway.json_text import Json
from twostroke.errors import NotFound, Unavailable

ALIAS = "default"  # the model served, whatever its name


def require_models(generator: Generator) -> list[ModelCard]:
    """The models served. Raises Unavailable while there are none: a list must not look ready before it is."""
    cards = list(generator.models)
    if not cards:
        raise Unavailable(generator.readiness or "no model is ready yet", retry_after=1)
    return cards


def model_list(generator: Generator) -> Json:
    """GET /v1/models."""
    return {"object": "list", "data": [_card(each) for each in require_models(generator)]}


def model(generator: Generator, name: str) -> Json:
    """GET /v1/models/{id}; "default" names the first. Raises NotFound."""
    cards = require_models(generator)
    for card in cards:
        if name in (card.id, ALIAS):
            return _card(card)
    raise NotFound(f"no model is called {name}", field="model")


def _card(card: ModelCard) -> Json:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "twostroke",
        "max_model_len": card.context_tokens,
        "weight_mode": card.weight_mode,
        "system_fingerprint": card.fingerprint,
    }
