"""One request inside the engine: what was asked, and its whole state."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from twostroke.engine.history import TokenHistory, history_for
from twostroke.kv.keys import block_key, block_keys
from twostroke.types import FinishReason, Priority, SamplingParams, StopConditions


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What the engine is asked for, in tokens.

    Attributes:
        id: for logs and errors; the engine does not compare it.
        prompt: token ids, at least one.
        root: parent key of the first block, `kv.keys.root_key`: requests share blocks only under one root.
        sampling: how tokens are chosen.
        stops: when the sequence ends.
        emitted: tokens generated elsewhere: by prefill, or by a worker that was lost. They count toward
            `max_tokens`, `min_tokens`, penalties and positions, and are not reported again.
        choices: noise key of each choice; more than one only with `first_token_only`.
        first_token_only: run the prompt, sample one token per choice, end.
        export: report blocks as they fill, each lent to the caller.
        max_uncached: refuse with BlocksMissing at admission when more tokens than this would have to be computed.
        priority: class of service.
    """

    id: str
    prompt: tuple[int, ...]
    root: bytes
    sampling: SamplingParams
    stops: StopConditions
    emitted: tuple[int, ...] = ()
    choices: tuple[int, ...] = (0,)
    first_token_only: bool = False
    export: bool = False
    max_uncached: int | None = None
    priority: Priority = Priority.STANDARD


class SequenceState(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # holds no page
    RUNNING = "running"  # holds pages for all of its tokens
    ENDED = "ended"  # holds no page, and never will


class Sequence:
    """One request's tokens, pages and keys. The scheduler changes it; the runner reads it.

    Attributes:
        request: as submitted.
        number: order of arrival; unique within an engine.
        tokens: the prompt, what was emitted before, and what was generated here.
        keys: of the full blocks of `tokens`, as far as they are known.
        pages: for `tokens` in order, of the whole block size each; empty unless RUNNING.
        computed: leading tokens whose keys and values are in `pages`.
        published: leading blocks that are in the prefix index, or have an equal there.
        exported: leading blocks that were reported and lent to the caller.
        cached: prompt tokens found in pages when first admitted; None before.
        preemptions: how often it gave way to others and had to begin again.
        ends: tokens that end it.
        limit: length at which it ends.
        history: what penalties look at; None when no penalty is in force.
    """

    __slots__ = (
        "_page_tokens",
        "cached",
        "computed",
        "ends",
        "exported",
        "history",
        "keys",
        "limit",
        "number",
        "pages",
        "preemptions",
        "published",
        "request",
        "state",
        "tokens",
    )

    def __init__(
        self, request: EngineRequest, *, number: int, page_tokens: int, context: int, end_token_ids: frozenset[int]
    ) -> None:
        sampling, stops = request.sampling, request.stops
        self.request = request
        self.number = number
        self.tokens = [*request.prompt, *request.emitted]
        self.keys = block_keys(request.root, self.tokens, page_tokens)
        self.pages: list[int] = []
        self.computed = self.published = self.exported = 0
        self.cached: int | None = None
        self.preemptions = 0
        self.state = SequenceState.WAITING
        self.ends = stops.stop_token_ids if stops.ignore_eos else stops.stop_token_ids | end_token_ids
        self.limit = min(len(request.prompt) + stops.max_tokens, context)
        self.history: TokenHistory | None = history_for(
            request.prompt,
            request.emitted,
            repetition=sampling.repetition_penalty != 1.0,
            repeats=sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0,
        )
        self._page_tokens = page_tokens

    @property
    def remaining(self) -> int:
        """Tokens to run before the next one can be sampled; at least 1."""
        return len(self.tokens) - self.computed

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that may not be sampled next, since `min_tokens` are not there yet."""
        generated = len(self.tokens) - len(self.request.prompt)
        return self.ends if generated < self.request.stops.min_tokens else frozenset()

    @property
    def length_to_admit(self) -> int:
        """Tokens that need room at admission: all, and the next one unless it will never be run."""
        if self.request.first_token_only:
            return len(self.tokens)
        return min(len(self.tokens) + 1, self.longest)

    @property
    def longest(self) -> int:
        """Most tokens that will ever need room; the last one sampled is not run."""
        return len(self.tokens) if self.request.first_token_only else self.limit - 1

    def append(self, token: int) -> None:
        """Record a generated token."""
        self.tokens.append(token)
        if self.history is not None:
            self.history.extend((token,))

    def verdict(self, token: int, length: int) -> FinishReason | None:
        """Why a sequence of `length` tokens, of which `token` is the last, ends there; None when it goes on."""
        if token in self.ends:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= self.limit else None

    def finished_elsewhere(self) -> FinishReason | None:
        """Why nothing is left to generate after the emitted tokens; None when something is."""
        return self.verdict(self.tokens[-1], len(self.tokens)) if self.request.emitted else None

    def parent(self, block: int) -> bytes:
        """The key before a block: the root's before the first."""
        return self.keys[block - 1] if block else self.request.root

    def extend_keys(self) -> None:
        """Name the blocks that `computed` tokens fill and that have no key yet."""
        size = self._page_tokens
        for block in range(len(self.keys), self.computed // size):
            self.keys.append(block_key(self.parent(block), self.tokens[block * size : (block + 1) * size]))

    def unfilled(self) -> Iterator[bytes]:
        """Keys of the blocks after `published` that the tokens it has will fill; an exported tail is the last."""
        yield from self.keys[self.published :]
        rest = self.tokens[len(self.keys) * self._page_tokens :]
        if rest and self.request.export and self.request.first_token_only:
            yield block_key(self.parent(len(self.keys)), rest)

    def tail_key(self, blocks: int) -> bytes:
        """The key of the computed tokens after `blocks` full blocks."""
        return block_key(self.parent(blocks), self.tokens[blocks * self._page_tokens : self.computed])

    def tails(self, blocks: int) -> Iterator[tuple[bytes, int]]:
        """Keys under which the rest of the tokens after `blocks` full blocks may be cached, the longest first.

        A rest is named exactly, either with the last token or without it: a prompt that was run before ends in the
        one, the same prompt with its first generated token in the other. At least one token is left to run.

        Yields: (key, tokens that a copy of that page spares), never more than all tokens but the last.
        """
        start, total = blocks * self._page_tokens, len(self.tokens)
        for end in (total, total - 1):
            if start < min(end, total - 1) and end - start <= self._page_tokens:
                yield block_key(self.parent(blocks), self.tokens[start:end]), min(end, total - 1)
