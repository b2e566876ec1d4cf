"""A piece of a prompt and whether control tokens may stand in it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_DEEPEST = 40  # beginnings within beginnings


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive text of a prompt.

    With `allow_special`, the names of control tokens in `text` are those tokens; without, they are plain characters.
    """

    text: str
    allow_special: bool


def any_of(names: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds `names`, leftmost first and of those the longest, as `tokenizers` matches added tokens.

    Names that begin alike share their beginning in it, so that a character costs no more with thousands of names.
    """
    return re.compile(_any_of(sorted(set(names) - {""}), _DEEPEST) or r"(?!)")  # (?!) matches nothing


def _any_of(names: Sequence[str], depth: int) -> str:
    """A pattern for sorted names; alternatives begin with different characters, so the longest is found first."""
    if depth == 0:  # the parser of patterns recurses too
        return "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    branches = []
    for _, alike in itertools.groupby(names, key=lambda name: name[0]):
        group = list(alike)
        shared = _shared_beginning(group[0], group[-1])  # of sorted names, so of all
        rests = [name[len(shared) :] for name in group if name != shared]
        tail = f"(?:{_any_of(rests, depth - 1)})" + ("?" if len(rests) < len(group) else "") if rests else ""
        branches.append(re.escape(shared) + tail)
    return "|".join(branches)


def _shared_beginning(first: str, last: str) -> str:
    unlike = (at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
    return first[: next(unlike, min(len(first), len(last)))]
