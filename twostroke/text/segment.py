"""A piece of a prompt and whether control tokens may stand in it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive text of a prompt.

    With `allow_special`, the names of control tokens in `text` are those tokens; without, they are plain characters.
    """

    text: str
    allow_special: bool


def any_of(names: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds `names`, leftmost first and of those the longest, as `tokenizers` matches added tokens."""
    longest_first = sorted(set(names), key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")  # (?!) matches nothing
