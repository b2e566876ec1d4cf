"""What the engine says: a sequence's progress, and how busy the engine is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.types import FinishReason, Token


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledBlock:
    """A block whose keys and values are complete in a page, lent to the caller until given back."""

    key: bytes
    page: int
    tokens: int  # fewer than a whole block in a partial tail
    index: int  # which block of the sequence
    parent: bytes  # key of the block before, or the root


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one sequence got since its last output was taken. Tokens gather; none is lost.

    Attributes:
        tokens: in order; with `first_token_only`, one per choice.
        filled: blocks complete since then, found ones before computed ones; only with `export`.
        computed: tokens of the sequence whose keys and values are in pages.
        cached: prompt tokens that were found in local pages at admission.
        finish: why the sequence ended. None while it runs, and for a first token that a choice goes on from.
        choices: with `first_token_only`, the same for each choice.
    """

    tokens: tuple[Token, ...] = ()
    filled: tuple[FilledBlock, ...] = ()
    computed: int
    cached: int
    finish: FinishReason | None = None
    choices: tuple[FinishReason | None, ...] = ()

    @classmethod
    def merged(cls, outputs: Sequence[StepOutput]) -> StepOutput:
        """One or more outputs of a sequence, in order, as one."""
        latest = outputs[-1]
        if len(outputs) == 1:
            return latest
        return cls(
            tokens=tuple(token for output in outputs for token in output.tokens),
            filled=tuple(block for output in outputs for block in output.filled),
            computed=latest.computed,
            cached=latest.cached,
            finish=latest.finish,
            choices=latest.choices,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """A consistent look at the engine between two steps."""

    running: int
    waiting: int
    waiting_tokens: int  # of all sequences: tokens, cached or not, still to be run before their next token
    free_pages: int
    evictable_pages: int
    lent_pages: int  # in the hands of imports and exports
    pages: int  # that can be given out: free, evictable, and referenced ones
    steps: int  # forward passes so far; it grows whenever there is progress
    busy: bool  # sequences or commands are present: then `steps` must grow
