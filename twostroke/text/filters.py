"""The filters chat templates may use, with a check of its size before each result that can outgrow its input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import filters, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context

from twostroke.text.meter import Meter

# fmt: off
SAFE_FILTERS = (  # those of Jinja whose result is about as large as what they are given
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby", "int",
    "items", "last", "length", "list", "lower", "max", "min", "reverse", "round", "safe", "sort", "string", "title",
    "trim", "truncate", "unique", "upper", "urlencode", "wordcount",
)
# fmt: on
MAX_INDENT = 64

_Filter = Callable[..., Any]
_LAZY: tuple[tuple[str, _Filter], ...] = (
    ("map", filters.sync_do_map),
    ("select", filters.sync_do_select),
    ("reject", filters.sync_do_reject),
    ("selectattr", filters.sync_do_selectattr),
    ("rejectattr", filters.sync_do_rejectattr),
)
_WIDE = re.compile(r"\d{3}|\*|\{[^{}]*\{")  # a width of 100 or more, or one taken from an argument


def require_plain_format(text: str) -> None:
    """Raise SecurityError for a format string, of either kind, that could ask for a huge width."""
    if _WIDE.search(text):
        raise SecurityError("the chat template formats text to a width that is not let through")


def guarded_filters(meter_of: Callable[[Context], Meter]) -> dict[str, _Filter]:
    """The filters that can multiply their input, each bound to the rendering's meter."""
    guarded = _Guarded(meter_of)
    lazy = {name: _stepping(inner, meter_of) for name, inner in _LAZY}
    named: dict[str, _Filter] = {
        "join": guarded.join,
        "replace": guarded.replace,
        "indent": guarded.indent,
        "format": guarded.format,
        "tojson": guarded.tojson,
        "sum": _sum,
    }
    return {**lazy, **named}


class _Guarded:
    """Filters of Jinja, by the same names and arguments, that ask a meter before they build a text."""

    def __init__(self, meter_of: Callable[[Context], Meter]) -> None:
        self._meter_of = meter_of

    @pass_context
    def join(self, context: Context, value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        if attribute is not None:
            value = filters.sync_do_map(context, value, attribute=attribute)
        parts = []
        for part in value:
            self._meter_of(context).reserve(len(d))
            self._meter_of(context).charge(part)
            parts.append(str(part))
        return str(d).join(parts)

    @pass_context
    def replace(self, context: Context, value: Any, old: str, new: str, count: int | None = None) -> str:
        text = str(value)
        self._meter_of(context).reserve((text.count(old) + 1) * len(new))
        return text.replace(old, new, -1 if count is None else count)

    @pass_context
    def indent(
        self, context: Context, value: Any, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        margin = width if isinstance(width, str) else " " * min(width, MAX_INDENT)
        text = str(value)
        self._meter_of(context).reserve((text.count("\n") + 1) * len(margin))
        return str(filters.do_indent(text, margin, first, blank))

    @pass_context
    def format(self, context: Context, value: Any, *args: Any, **kwargs: Any) -> str:
        require_plain_format(str(value))
        text = str(filters.do_format(str(value), *args, **kwargs))
        self._meter_of(context).charge(text)
        return text

    @pass_context
    def tojson(
        self,
        context: Context,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        if (indent or 0) > MAX_INDENT or any(len(each) > MAX_INDENT for each in separators or ()):
            raise SecurityError("the chat template writes JSON wider than is let through")
        self._meter_of(context).charge(value)
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        self._meter_of(context).charge(text)
        return text


@pass_context
def _sum(context: Context, value: Iterable[Any], attribute: str | int | None = None, start: float = 0) -> Any:
    if not isinstance(start, int | float):
        raise SecurityError("the chat template sums something else than numbers")
    return filters.sync_do_sum(context.environment, value, attribute, start)


def _stepping(inner: _Filter, meter_of: Callable[[Context], Meter]) -> _Filter:
    """`inner`, which yields item by item, with a step for each."""

    @pass_context
    def stepping(context: Context, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for item in inner(context, *args, **kwargs):
            meter_of(context).step()
            yield item

    return stepping
