"""What runs in a container imports nothing that its image may lack."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from kit.paths import INSIDE

CARRIED = {"httpx", "httptools", "uvloop", "pynvml"}
FILES = sorted(INSIDE.glob("*.py"))


def imported(path: Path) -> set[str]:
    """Return the top names that a file imports; relative imports stay inside and are left out."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1, f"{path.name} imports from outside the package"
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_only_the_standard_library_and_what_every_lock_carries(path: Path) -> None:
    assert imported(path) - set(sys.stdlib_module_names) <= CARRIED


def test_the_parts_that_measure_are_among_them() -> None:
    assert {"window", "scrape", "ask", "stub", "clock", "load"} <= {path.stem for path in FILES}
