"""A model to be computed on paper: pages hold token ids, and the next token is a checksum of what is read there."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any

from twostroke.engine.core import Delivery, EngineCore
from twostroke.engine.outputs import StepOutput
from twostroke.engine.sequence import EngineRequest, Sequence
from twostroke.engine.settings import EngineSettings
from twostroke.engine.step import Step
from twostroke.engine.validation import Bounds
from twostroke.errors import TwostrokeError
from twostroke.types import FinishReason, Priority, SamplingParams, StopConditions, Token

PAGE_TOKENS = 4
VOCAB = 97
CONTEXT = 64
END = 13


def next_token(tokens: Items[int], choice: int = 0) -> int:
    """What follows `tokens`."""
    return (zlib.crc32(bytes(tokens)) + choice) % VOCAB


def written(prompt: Items[int], max_tokens: int, end: int | None = END) -> tuple[list[int], FinishReason]:
    """The whole answer to a prompt, and why it ends."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens))
        if tokens[-1] == end:
            return tokens[len(prompt) :], FinishReason.STOP
        if len(tokens) == min(len(prompt) + max_tokens, CONTEXT):
            return tokens[len(prompt) :], FinishReason.LENGTH


class Paper:
    """A StepRunner that reads a sequence's past only from its pages, so that a wrong page is a wrong token."""

    def __init__(self) -> None:
        self.pages: dict[int, list[int]] = {}
        self.steps: list[Step] = []

    def run(self, step: Step) -> Mapping[Sequence, tuple[Token, ...]]:
        self.steps.append(step)
        for copy in step.copies:
            self.pages[copy.target] = list(self.pages[copy.source])
        for chunk in step.chunks:  # all writes come before any read, as in the layers of a real model
            for position in range(chunk.start, chunk.start + chunk.count):
                page = chunk.sequence.pages[position // PAGE_TOKENS]
                slots = self.pages.setdefault(page, [0] * PAGE_TOKENS)
                slots[position % PAGE_TOKENS] = chunk.sequence.tokens[position]
        return {chunk.sequence: self._sampled(chunk.sequence) if chunk.samples else () for chunk in step.chunks}

    def _sampled(self, sequence: Sequence) -> tuple[Token, ...]:
        read = [slot for page in sequence.pages for slot in self.pages.get(page, [0] * PAGE_TOKENS)]
        past = read[: len(sequence.tokens)]
        return tuple(Token(next_token(past, choice)) for choice in sequence.request.choices)


def paper_request(
    prompt: Items[int],
    *,
    max_tokens: int = 8,
    emitted: tuple[int, ...] = (),
    choices: tuple[int, ...] = (0,),
    first_token_only: bool = False,
    export: bool = False,
    max_uncached: int | None = None,
    priority: Priority = Priority.STANDARD,
    ignore_eos: bool = True,
) -> EngineRequest:
    return EngineRequest(
        id="paper",
        prompt=tuple(prompt),
        root=b"root",
        sampling=SamplingParams(),
        stops=StopConditions(max_tokens=max_tokens, ignore_eos=ignore_eos),
        emitted=emitted,
        choices=choices,
        first_token_only=first_token_only,
        export=export,
        max_uncached=max_uncached,
        priority=priority,
    )


class Desk:
    """An EngineCore over Paper, with everything it delivered in order."""

    def __init__(self, *, pages: int = 33, context: int = CONTEXT, **settings: Any) -> None:
        self.settings = EngineSettings(**{"pages": pages, "tokens_per_step": 16, "max_running": 4} | settings)
        self.bounds = Bounds(vocab_size=VOCAB, context=context, page_tokens=PAGE_TOKENS, pages=pages - 1)
        self.paper = Paper()
        self.core = EngineCore(self.settings, self.bounds, frozenset({END}), self.paper)
        self.outputs: dict[int, list[StepOutput]] = {}
        self.errors: dict[int, TwostrokeError] = {}
        self._numbers = 0

    def submit(self, request: EngineRequest) -> int:
        self.bounds.check(request)
        number = self._numbers
        self._numbers += 1
        self.outputs[number] = []
        self._take(self.core.submit(number, request))
        return number

    def step(self) -> bool:
        """Run one step; False when nothing could run."""
        deliveries = self.core.step()
        self._take(deliveries or [])
        return deliveries is not None

    def drain(self) -> None:
        """Step until nothing can run."""
        while self.step():
            pass

    def settle(self) -> None:
        """Run everything to its end and prove the page accounts."""
        self.drain()
        self.core.check_integrity()
        load = self.core.load()
        assert not load.busy
        assert load.free_pages + load.evictable_pages + load.lent_pages == load.pages

    def expect(self, number: int, prompt: list[int], max_tokens: int) -> None:
        """The sequence got the whole answer to its prompt."""
        assert self.tokens(number) == written(prompt, max_tokens, end=None)[0]

    @property
    def chunks(self) -> list[list[tuple[int, int, int]]]:
        """Each step's chunks as (sequence, start, count)."""
        return [[(each.sequence.number, each.start, each.count) for each in step.chunks] for step in self.paper.steps]

    def tokens(self, number: int) -> list[int]:
        return [token.id for output in self.outputs[number] for token in output.tokens]

    def finish(self, number: int) -> FinishReason | None:
        return self.outputs[number][-1].finish if self.outputs[number] else None

    def lent(self, number: int) -> list[int]:
        """Pages lent with a sequence's exported blocks."""
        return [block.page for output in self.outputs[number] for block in output.filled]

    def _take(self, deliveries: Items[Delivery]) -> None:
        for delivery in deliveries:
            if isinstance(delivery.outcome, StepOutput):
                self.outputs[delivery.number].append(delivery.outcome)
            else:
                self.errors[delivery.number] = delivery.outcome
