"""Tells which control tokens of a rendered chat come from its template, and which a caller wrote into a message.

Jinja loses track of where text comes from, so the chat is rendered a second time with the callers' text *marked*: each
marked character is replaced by one of its own in a private-use plane. Rendering keeps lengths, so the two results are
compared position by position: where they differ, the caller's text stands. The first rendering is the text that is
used; the marked one is only evidence, and evidence that does not fit (a template that looks for what was marked) is
discarded for that of a weaker marking.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence

from twostroke.limits import ROLES
from twostroke.text.segment import Segment, any_of

_PLANE = 0xF0000  # Supplementary Private Use Area-A ...
_PLANE_CHARACTERS = 0xFFFE  # ... and how many it has
_UNMARKABLE = frozenset("\"'\\")  # JSON and string literals treat these apart
_WORD = "type"  # a field whose words templates compare; marked only where they name a token


class Marking(enum.Enum):
    """How much of the callers' text is marked, strongest first.

    The strongest also finds control tokens put together from several messages, or from a message and the template.
    """

    EVERY = enum.auto()  # each character that occurs in the name of a control token
    PUNCTUATION = enum.auto()  # of those, the ones that are neither letter nor digit, where a name has any
    NAMES = enum.auto()  # whole names of control tokens


class Provenance:
    """Marks values before a rendering and reads the marks after it."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names` are the control tokens' names, as templates write them."""
        self._names = any_of(names)
        letters = [{char for char in name if _markable(char)} for name in names]
        punctuation = [{char for char in name if not char.isalnum()} or name for name in letters]
        self._every = _marks(letters)
        self._tables = {Marking.EVERY: self._every, Marking.PUNCTUATION: _marks(punctuation)}

    def marked(self, value: object, marking: Marking) -> object:
        """A copy of a JSON-like value with its strings marked; in keys, names of control tokens are."""
        table = self._tables.get(marking)
        return _mapped(
            value, self._mark_names if table is None else lambda text: text.translate(table), self._mark_names
        )

    def segments(self, text: str, evidence: str) -> list[Segment] | None:
        """Split `text` so that the template's control tokens, and nothing else, stand in segments that allow them.

        Args:
            text: the chat, rendered.
            evidence: the same chat, rendered from marked values.
        Returns: None, if `evidence` is another text than `text`.
        """
        if len(text) != len(evidence) or text.translate(self._every) != evidence.translate(self._every):
            return None
        found: list[Segment] = []
        start = 0
        for match in self._names.finditer(text):
            if match[0] == evidence[match.start() : match.end()]:
                found += [Segment(text[start : match.start()], False), Segment(match[0], True)]
                start = match.end()
        found.append(Segment(text[start:], False))
        return [segment for segment in found if segment.text]

    def _mark_names(self, text: str) -> str:
        return self._names.sub(lambda match: match[0].translate(self._every), text)


def _markable(char: str) -> bool:
    return not char.isspace() and char not in _UNMARKABLE and ord(char) < _PLANE_CHARACTERS


def _marks(groups: Sequence[set[str]]) -> dict[int, int]:
    return {ord(char): _PLANE + ord(char) for group in groups for char in group}


def _mapped(value: object, words: Callable[[str], str], keys: Callable[[str], str]) -> object:
    if isinstance(value, str):
        return words(value)
    if isinstance(value, Mapping):
        return {
            keys(key): item if _is_role(key, item) else _mapped(item, keys if key == _WORD else words, keys)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_mapped(item, words, keys) for item in value]
    return value


def _is_role(key: str, value: object) -> bool:
    """A known role may be a part of a control token's name, as in `'<|' + message.role + '|>'`."""
    return key == "role" and isinstance(value, str) and value in ROLES
