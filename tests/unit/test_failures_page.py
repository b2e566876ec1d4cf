"""The page of known failures names tests, and these exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [line for line in (ROOT / "docs" / "failures.md").read_text().splitlines() if line.startswith("| ")]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_failure_has_a_test() -> None:
    rows = [row for row in ROWS if not row.startswith("| failure seen")]
    assert rows
    assert [row for row in rows if not NAMED.search(row)] == []


@pytest.mark.parametrize(("file", "name"), NAMED.findall("\n".join(ROWS)))
def test_a_test_that_is_named_exists(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
