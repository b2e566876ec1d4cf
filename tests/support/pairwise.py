"""All pairs: a small set of cases in which every two values of different parameters meet at least once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeAlias

Value: TypeAlias = tuple[str, int]  # a parameter, and which of its values
Pair: TypeAlias = tuple[Value, Value]


def all_pairs(parameters: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Greedy cover: each case takes, parameter by parameter, the value that meets most pairs not yet met."""
    names = sorted(parameters)
    open_pairs = {
        ((one, i), (two, j))
        for one, two in combinations(names, 2)
        for i in range(len(parameters[one]))
        for j in range(len(parameters[two]))
    }
    while open_pairs:
        (one, i), (two, j) = min(open_pairs)
        chosen = {one: i, two: j}
        for name in names:
            if name not in chosen:
                met = [_met(name, value, chosen, open_pairs) for value in range(len(parameters[name]))]
                chosen[name] = met.index(max(met))
        open_pairs -= {_pair(a, b) for a, b in combinations(chosen.items(), 2)}
        yield {name: parameters[name][chosen[name]] for name in names}


def _pair(a: Value, b: Value) -> Pair:
    return (a, b) if a < b else (b, a)


def _met(name: str, value: int, chosen: Mapping[str, int], open_pairs: set[Pair]) -> int:
    return sum(_pair((name, value), each) in open_pairs for each in chosen.items())
