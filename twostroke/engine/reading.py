"""A model that reads token ids without scheduler, sampler or service: to score texts, and to continue them greedily."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from twostroke.engine.batch import Segment, build_batch
from twostroke.engine.cache import KvCache
from twostroke.engine.forward import EagerForward
from twostroke.engine.weights import LoadedModel


class Reader:
    """Sequences side by side in pages of their own; each call reads on where the last one ended.

    Args:
        loaded: the model.
        sequences: how many there are.
        tokens: the most that one of them gets to.
    """

    def __init__(self, loaded: LoadedModel, *, sequences: int, tokens: int) -> None:
        self._model, backend = loaded.model, loaded.model.backend
        form = loaded.kv_format()
        each = -(-tokens // form.block_tokens)
        cache = KvCache(form, 1 + sequences * each, backend.device)
        self._forward = EagerForward(loaded.model, backend.attention(cache, loaded.config.attention))
        self._block_tokens = form.block_tokens
        self._pages = [range(1 + at * each, 1 + (at + 1) * each) for at in range(sequences)]
        self._read = [0] * sequences

    @torch.inference_mode()
    def read(self, pieces: Sequence[Sequence[int]]) -> Tensor:
        """Run the next tokens of every sequence in one pass; returns [T, hidden], sequence by sequence.

        Raises:
            Internal: a sequence has no token, or more than there is room for.
        """
        parts = zip(pieces, self._read, self._pages, strict=True)
        batch = build_batch([Segment(piece, start, pages, True) for piece, start, pages in parts], self._block_tokens)
        self._read = [start + len(piece) for start, piece in zip(self._read, pieces, strict=True)]
        return self._forward(batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """Score the next token after each row of hidden [R, hidden]: float32 [R, vocab], on the CPU."""
        return self._model.logits(hidden).cpu()


def continued(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], tokens: int, tell: Callable[[int], None]
) -> tuple[tuple[int, ...], ...]:
    """Continue prompts side by side, always by the likeliest token; tokens that end an answer end nothing here.

    Args:
        loaded: the model.
        prompts: token ids; one forward pass takes all of them.
        tokens: to write after each.
        tell: called with the count of tokens written after each so far.
    """
    reader = Reader(loaded, sequences=len(prompts), tokens=max(map(len, prompts)) + tokens)
    pieces: Sequence[Sequence[int]] = prompts
    written: list[list[int]] = []
    for count in range(1, tokens + 1):
        ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0) - 1
        best = reader.logits(reader.read(pieces)[ends]).argmax(-1).tolist()
        pieces = [[token] for token in best]
        written.append(best)
        tell(count)
    return tuple(zip(*written, strict=True))
