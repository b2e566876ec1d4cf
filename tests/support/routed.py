"""A question and its answer through a router, in the same words as one engine alone answers it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field, fields

from tests.support.alone import Alone, Told
from twostroke.client import Client
from twostroke.types import ChoiceFinished, Delta, FinishReason, SamplingParams, StopConditions, Token, Usage

SECONDS = 60.0  # for one answer


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked."""

    prompt: tuple[int, ...]
    stops: StopConditions
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    n: int = 1
    stop_strings: tuple[str, ...] = ()

    async def alone(self, engine: Alone) -> list[Told]:
        """Its answer from one engine."""
        return await engine.answer(self.prompt, self.sampling, self.stops, n=self.n, stop_strings=self.stop_strings)


@dataclass(frozen=True)
class Routed:
    """What came back, whole."""

    choices: list[Told]
    usage: Usage

    def assert_same(self, truth: list[Told]) -> None:
        """Token for token, in text and reason too, and counted once."""
        for mine, theirs in zip(self.choices, truth, strict=True):
            assert (mine.ids, mine.text, mine.finish) == (theirs.ids, theirs.text, theirs.finish)
        assert self.usage.completion_tokens == sum(len(each.ids) for each in truth)


class Answering:
    """An answer on its way; what has come so far can be read meanwhile."""

    def __init__(self, question: Question, changed: Callable[[], None] = lambda: None) -> None:
        self.question = question
        self.texts = [""] * question.n
        self.tokens: list[list[Token]] = [[] for _ in range(question.n)]
        self.begun = False  # something came
        self._finishes: list[FinishReason | None] = [None] * question.n
        self._sequences = [0] * question.n
        self._changed = changed

    @property
    def least(self) -> int:
        """Tokens of the choice that is least far."""
        return min(len(tokens) for tokens in self.tokens)

    async def asked(
        self, client: Client, *, request_id: str | None = None, cache_salt: str = "", seconds: float = SECONDS
    ) -> Routed:
        """Ask the router behind `client`; no message may be missing or come twice."""
        question, usage = self.question, Usage(prompt_tokens=0)
        events = client.generate(
            question.prompt,
            max_tokens=question.stops.max_tokens,
            min_tokens=question.stops.min_tokens,
            stop_token_ids=sorted(question.stops.stop_token_ids),
            ignore_eos=question.stops.ignore_eos,
            stop=question.stop_strings,
            n=question.n,
            request_id=request_id,
            cache_salt=cache_salt,
            timeout=seconds,
            **{each.name: getattr(question.sampling, each.name) for each in fields(SamplingParams)},
        )
        async with aclosing(events):
            async for event in events:
                self.begun = True
                match event:
                    case Delta():
                        self._take(event)
                    case ChoiceFinished():
                        self._finishes[event.choice] = event.reason
                    case Usage():
                        usage = event
                self._changed()
        assert usage.prompt_tokens == len(question.prompt)
        told = zip(self.tokens, self.texts, self._finishes, strict=True)
        return Routed([Told(tuple(tokens), text, reason) for tokens, text, reason in told if reason], usage)

    def _take(self, delta: Delta) -> None:
        self._sequences[delta.choice] += 1
        assert delta.sequence == self._sequences[delta.choice]
        self.texts[delta.choice] += delta.text
        self.tokens[delta.choice] += delta.tokens
        assert delta.total_tokens == len(self.tokens[delta.choice])
