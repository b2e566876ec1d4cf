"""Where output goes: data to standard output, the rest to standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def show(text: str, *, end: str = "\n") -> None:
    """Write data, at once."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def note(text: str) -> None:
    """Tell the user something that is not data."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def complain(message: str, cure: str | None = None) -> None:
    """Say what went wrong, and what to try."""
    note(f"twostroke: {message}" + (f"\n  try: {cure}" if cure else ""))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Left-aligned columns, as wide as their widest cell."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)
