"""What `twostroke eval` found, as a table for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twostroke.cli.terminal import table

if TYPE_CHECKING:
    from twostroke.engine.quality import Cost, Likeness

HEADER = ("WEIGHTS", "SIZE", "PERPLEXITY", "CHANGE", "KL MEAN", "KL P99", "KL MAX", "TOP-1", "GREEDY", "LOGIT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One mode's cost."""

    mode: str
    weight_bytes: int
    cost: Cost
    likeness: Likeness
    broken: Sequence[str]  # limits, in words


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that one run found."""

    model: str
    against: str  # the mode that the others are measured against
    against_bytes: int
    answer_tokens: int
    window_tokens: int
    findings: Sequence[Finding]

    def as_table(self) -> str:
        """A line a mode, the reference first, and what the columns mean."""
        first = self.findings[0]
        reference = (self.against, _size(self.against_bytes), f"{first.cost.reference_perplexity:.4f}")
        rows = [(*reference, *"-" * (len(HEADER) - len(reference))), *map(self._row, self.findings)]
        return (
            f"{table(HEADER, rows)}\n\n"
            f"{self.model}: {first.cost.tokens} tokens scored in windows of at most {self.window_tokens}, "
            f"{len(first.likeness.alike)} answers of {self.answer_tokens} tokens, all against {self.against}.\n"
            "CHANGE: of the perplexity, with its standard error. KL: divergence in nats a token. TOP-1: same likeliest "
            "token.\nGREEDY: tokens until an answer differs, median and least. LOGIT: largest difference."
        )

    def as_json(self) -> str:
        """One line; shares are of 1, divergences in nats."""
        first = self.findings[0]
        return json.dumps(
            {
                "model": self.model,
                "against": {
                    "weights": self.against,
                    "weight_bytes": self.against_bytes,
                    "perplexity": first.cost.reference_perplexity,
                },
                "window_tokens": self.window_tokens,
                "answer_tokens": self.answer_tokens,
                "modes": list(map(_fields, self.findings)),
            },
            allow_nan=False,
        )

    def _row(self, finding: Finding) -> tuple[str, ...]:
        cost, alike = finding.cost, finding.likeness
        return (
            finding.mode,
            _size(finding.weight_bytes),
            f"{cost.perplexity:.4f}",
            f"{100 * cost.perplexity_change:+.3f}% ± {100 * cost.perplexity_error:.3f}%",
            f"{cost.kl_mean:.2e}",
            f"{cost.kl_p99:.2e}",
            f"{cost.kl_max:.2e}",
            f"{100 * cost.top1:.2f}%",
            f"{alike.median:g}, {alike.least} of {self.answer_tokens}",
            f"{cost.logit:.2g}",
        )


def _fields(finding: Finding) -> dict[str, Any]:
    return {
        "weights": finding.mode,
        "weight_bytes": finding.weight_bytes,
        **dataclasses.asdict(finding.cost),
        "greedy_median": finding.likeness.median,
        "greedy_least": finding.likeness.least,
        "broken": list(finding.broken),
    }


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
