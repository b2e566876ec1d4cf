"""A model's two ends: embeddings, and the output head with its norm. Embeddings and head are often one matrix."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from torch import Tensor

from twostroke.engine.backend import Backend, Embedding, Linear
from twostroke.engine.config import ModelConfig
from twostroke.engine.loading.parts import Parts
from twostroke.engine.models.layers import load_norm

_log = logging.getLogger(__name__)
_EMBEDDINGS, _NORM, _HEAD = "model.embed_tokens", "model.norm", "lm_head"


@dataclass(frozen=True, slots=True)
class Ends:
    """What comes before the first layer and after the last."""

    embed: Embedding
    norm: Tensor  # [hidden]
    head: Linear
    tied: bool  # the head is the embeddings

    def settled(self, config: ModelConfig) -> ModelConfig:
        """Return `config` as the files bear it out: they decide whether the head is the embeddings."""
        return replace(config, tied_embeddings=self.tied)


def load_ends(config: ModelConfig, parts: Parts, backend: Backend) -> Ends:
    """Build both ends; a head that is not in the files is the embeddings. Raises ModelError as `parts` do."""
    embeddings = parts.matrix((_EMBEDDINGS, config.vocab_size), columns=config.hidden_size)
    tied = not parts.has(f"{_HEAD}.weight")
    if tied and not config.tied_embeddings:
        _log.warning("the files lack %s.weight, which the configuration unties: the embeddings serve as head", _HEAD)
    if tied:
        head = embeddings = backend.placed(embeddings)  # which both keep
    else:
        head = parts.matrix((_HEAD, config.vocab_size), columns=config.hidden_size)
    norm = load_norm(config, parts, backend, _NORM, config.hidden_size)
    return Ends(backend.embedding(embeddings), norm, backend.linear(head), tied)
