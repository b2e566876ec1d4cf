"""What a weight mode may cost: limits as a user writes them, and which of them a measured cost breaks.

`perplexity=1%,top1=97%` allows a perplexity that is 1% higher and asks for at least 97% of equal first choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.launcher.refusal import Refusal
from twostroke.settings import unknown_name

if TYPE_CHECKING:
    from twostroke.engine.quality import Cost, Likeness


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One number that can be limited."""

    about: str
    take: Callable[[Cost, Likeness], float]
    is_least: bool = False  # a limit is the least that is allowed, not the most
    in_percent: bool = False


MEASURES: Mapping[str, Measure] = {
    "perplexity": Measure(about="rise of the perplexity", take=lambda cost, _: cost.perplexity_change, in_percent=True),
    "kl": Measure(about="mean divergence in nats", take=lambda cost, _: cost.kl_mean),
    "kl_p99": Measure(about="divergence in nats that 99% of tokens keep to", take=lambda cost, _: cost.kl_p99),
    "kl_max": Measure(about="largest divergence in nats", take=lambda cost, _: cost.kl_max),
    "logit": Measure(about="largest difference of a logit", take=lambda cost, _: cost.logit),
    "top1": Measure(
        about="share of equal first choices", take=lambda cost, _: cost.top1, is_least=True, in_percent=True
    ),
    "greedy": Measure(about="median of equal greedy tokens", take=lambda _, likeness: likeness.median, is_least=True),
}


@dataclass(frozen=True, slots=True)
class Limit:
    """The most, or the least, that one measure may be; a share of 1 where it is told in percent."""

    name: str
    value: float

    def broken_by(self, cost: Cost, likeness: Likeness) -> str | None:
        """How a cost breaks this limit, in words, if it does."""
        measure = MEASURES[self.name]
        found = measure.take(cost, likeness)
        if found >= self.value if measure.is_least else found <= self.value:
            return None
        bound = "at least" if measure.is_least else "at most"
        return f"{measure.about} is {_shown(found, measure)}; {bound} {_shown(self.value, measure)} is allowed"


def parse_limits(text: str) -> tuple[Limit, ...]:
    """Limits from `NAME=NUMBER,...`; measures in percent need their sign, the others take none. Empty is no limit.

    Raises: Refusal, naming what was not understood.
    """
    return tuple(_limit(part.strip()) for part in text.split(",")) if text.strip() else ()


def broken(limits: Sequence[Limit], cost: Cost, likeness: Likeness) -> list[str]:
    """Each limit that this cost breaks, in words."""
    return [words for limit in limits if (words := limit.broken_by(cost, likeness)) is not None]


def _limit(part: str) -> Limit:
    name, _, number = (each.strip() for each in part.partition("="))
    if name not in MEASURES:
        raise Refusal(f"--max-cost: {unknown_name('measure', name, list(MEASURES))}", _cure())
    percent = MEASURES[name].in_percent
    try:
        value = float(number.removesuffix("%") if percent else number)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or percent != number.endswith("%"):
        raise Refusal(f"--max-cost: {part} is no limit", _cure())
    return Limit(name, value / 100 if percent else value)


def _cure() -> str:
    examples = (
        f"{name}={'97%' if measure.is_least else '1%'}" if measure.in_percent else f"{name}=NUMBER"
        for name, measure in MEASURES.items()
    )
    return f"write some of {','.join(examples)}"


def _shown(value: float, measure: Measure) -> str:
    return f"{100 * value:.3g}%" if measure.in_percent else f"{value:.3g}"
